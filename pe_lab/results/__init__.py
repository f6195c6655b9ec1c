"""What evaluation writes and reports read: result records, sample records, intervals."""

from pe_lab.results.intervals import Z95, Mean, interval_of, mean_of, wilson
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, SampleRecord

__all__ = [
    "Z95",
    "Mean",
    "Record",
    "RecordFile",
    "SampleFile",
    "SampleRecord",
    "finite",
    "interval_of",
    "mean_of",
    "wilson",
]
