"""Trackers: MLflow, W&B, TensorBoard, Trackio and others show the runs of a trial.

The driver only writes records into the trial's journal. A separate process, the sender, reads the
journal and sends each tracker the records that it lacks, so that a tracker neither stops nor slows
training. Records that are not sent when the run ends are sent by the trial's next run, or by
`trialflow runs sync`::

    driver ── tracking.py ──► journal.jsonl ──► sender.py ──► outbox.py ──► in_mlflow.py, …
"""
