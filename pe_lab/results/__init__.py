"""What evaluation writes and reports read: result records, sample records, intervals."""
