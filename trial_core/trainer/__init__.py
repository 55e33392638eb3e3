"""`init` and `Trainer.fit` in a script, in a slot or outside, without Prefect."""
