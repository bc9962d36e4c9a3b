"""The table of a run's episodes: Parquet files of one schema, which pandas, polars, DuckDB and `datasets` read."""
