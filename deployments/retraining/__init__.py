"""Deployments and schedules that retrain a model."""
