"""What lies in a bucket: names, identity, records and JSON objects; pure, no I/O."""
