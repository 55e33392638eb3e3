"""The stages of the flows: one Prefect task each."""
