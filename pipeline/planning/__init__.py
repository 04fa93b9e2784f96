"""Plan a job: sample, cut into shards, recognise earlier plans and duplicates."""
