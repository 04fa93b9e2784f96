"""Tasks of lm-evaluation-harness on a student; one of them lies here, with its questions, and needs no network."""
