"""The object store: verbs, failures, and the read side of commits, plans, quarantines and manifests."""
