"""What a run will need before it runs: memory, FLOPs, chip hours, by arithmetic and by the compiler."""
