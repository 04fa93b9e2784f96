"""Run a job: shards, workers, pools, the driver."""
