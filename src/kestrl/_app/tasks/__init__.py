"""Generated tasks and data sets in the forms of others."""
