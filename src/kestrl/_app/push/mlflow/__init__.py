"""The target MLflow: a trace an episode by OTLP, and a run by MLflow's REST API, without the package `mlflow`."""
