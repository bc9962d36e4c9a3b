"""Data sets: one row a scenario, JSONL or Parquet, in the plain form or in verl's; every row validated before anything starts."""

from kestrl.data.locate import locate_data
from kestrl.data.rows import load_scenarios

__all__ = ["load_scenarios", "locate_data"]
