"""What a checkpoint is: its manifest, where it lies, how it is committed and found again."""
