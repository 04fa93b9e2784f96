"""`python -m trainer`."""

import logging
import os

# Libraries report optional parts that they could not load; a user of this command can do nothing with that. Before
# their import, because that is when they do.
for noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

# Packed sequences bring new shapes all the time; growing segments keep the memory between them usable.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from trainer.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
