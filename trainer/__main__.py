"""`python -m trainer`."""

import logging

# Libraries report optional parts that they could not load; a user of this command can do nothing with that. Before
# their import, because that is when they do.
for noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

from trainer.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
