"""Data sets: one scenario per row, JSONL or Parquet, in the plain form or in verl's. Every row is validated before a
run starts.
"""

from kestrl.data.locate import locate_data
from kestrl.data.rows import load_scenarios

__all__ = ["load_scenarios", "locate_data"]
