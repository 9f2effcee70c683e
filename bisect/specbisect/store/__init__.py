"""The run directory: everything a run has found out so far, in one SQLite file that only one process writes."""

from specbisect.store.database import Store
from specbisect.store.schema import Row, Totals, TrialRecord

__all__ = ["Row", "Store", "Totals", "TrialRecord"]
