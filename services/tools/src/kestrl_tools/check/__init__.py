"""Checks of a job's tools: `python -m kestrl_tools.check` loads them and looks at the rows, `kestrl_tools.check.plays`
plays episodes without a model.
"""
