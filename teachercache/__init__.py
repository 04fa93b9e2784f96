"""teachercache: the contract between those who run a teacher once and those who train students from its rows.

Identity, layout, codecs, commit protocol, manifests, readers and their command line. docs/FORMAT.md is normative.
Never imports ray, vllm or torch.
"""

from teachercache import errors
from teachercache.commit import Commit, CommitResult
from teachercache.fingerprint import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.manifest import Manifest
from teachercache.plan import Plan, PlanShard, Quarantine
from teachercache.reader import Cache, open
from teachercache.record import Record, check_record, content_key, tail_from_logprobs
from teachercache.spec import CacheSpec, TeacherSpec, TokenizerSpec
from teachercache.store import Store
from teachercache.writer import CacheWriter, create

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "CacheSpec",
    "CacheWriter",
    "Commit",
    "CommitResult",
    "Manifest",
    "Plan",
    "PlanShard",
    "Quarantine",
    "Record",
    "Store",
    "TeacherSpec",
    "TokenizerSpec",
    "check_record",
    "content_key",
    "create",
    "errors",
    "fingerprint_config",
    "fingerprint_tokenizer",
    "fingerprint_weights",
    "open",
    "tail_from_logprobs",
]
