"""The run-time checker of annotations, which conftest.py puts on every function of pe_lab."""

from beartype import BeartypeConf, beartype

# An int is a float where a float is asked for, as in every other Python (PEP 484).
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
