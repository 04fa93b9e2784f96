"""Watch a job: status, progress, preview, metrics, doctor."""
