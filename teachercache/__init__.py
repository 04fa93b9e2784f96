"""teachercache: the contract between those who run a teacher once and those who train students from its rows.

Identity, layout, codecs, commit protocol, manifests, readers and their command line. docs/FORMAT.md is normative.
Never imports ray, vllm or torch. docs/ARCHITECTURE.md says what each room is for.
"""

from teachercache import errors
from teachercache.fingerprint import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.format.objects import Commit, Manifest, Plan, PlanShard, Quarantine
from teachercache.format.record import Record, check_record, content_key, tail_from_logprobs
from teachercache.format.spec import CacheSpec, TeacherSpec, TokenizerSpec
from teachercache.read.cache import Cache, open
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.write.attempt import CommitResult
from teachercache.write.writer import CacheWriter, create

__version__ = "0.1.0"
__all__ = [
    "Cache", "CacheSpec", "CacheWriter", "Commit", "CommitResult", "Ledger", "Manifest", "Plan", "PlanShard",
    "Quarantine", "Record", "Store", "TeacherSpec", "TokenizerSpec", "check_record", "content_key", "create", "errors",
    "fingerprint_config", "fingerprint_tokenizer", "fingerprint_weights", "open", "tail_from_logprobs",
]  # fmt: skip
