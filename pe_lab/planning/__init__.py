"""The needs of a run before it starts: parameters, FLOPs, hours, and memory estimated from shapes or compiled."""
