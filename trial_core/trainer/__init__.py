"""`Trainer.fit`: a run in a script of the user, without Prefect and without a driver."""
