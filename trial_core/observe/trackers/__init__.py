"""Trackers: MLflow, W&B, TensorBoard, Trackio and others show what a trial's runs have done.

The driver writes records into the trial's journal, and does nothing else. A process beside it, the
sender, reads the journal and sends what each tracker has not got yet, so that a tracker neither
stops nor slows training. What is not sent when the run ends is sent by the trial's next run, or by
`trialflow runs sync`::

    driver ── tracking.py ──► journal.jsonl ──► sender.py ──► outbox.py ──► in_mlflow.py, …
"""
