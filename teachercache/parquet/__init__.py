"""Data files: encode, decode and check Parquet in both codecs."""
