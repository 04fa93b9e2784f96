"""From files to windows of token ids: inputs → readers → documents → encode (templates, windows)."""
