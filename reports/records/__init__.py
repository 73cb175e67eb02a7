"""Records: the data that pass from judging to reporting, and the files that hold them.

`record` defines a record, `run_record` the facts of a whole run, `measurement` times and memory, and `run_info` what
else a report shows. `record_files` reads and writes them all.
"""

from __future__ import annotations

from reports.records.error_map import MAX_CELLS, ErrorMap
from reports.records.record import (
    BEYOND_ROUNDING,
    BRANCHES,
    DECLARATIONS_TRIED,
    DEFAULT_PRECISION,
    EARLY_END,
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    FLAGS_DIFFER,
    IN_PROCESS,
    JUDGED,
    PASS,
    RATIO_FAST_COMPILE,
    RECORD_SCHEMA,
    RED,
    REFUSED,
    REFUSED_PRECISION,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    VERDICTS,
    Record,
    Worst,
    merge_records,
)
from reports.records.record_files import (
    RecordFileError,
    has_measurements,
    iter_lines,
    parse_record,
    parse_run,
    read_jsonl,
    read_measurements,
    read_runs,
    serialize_end,
    serialize_job,
    serialize_measurement,
    serialize_probe,
    serialize_proposal,
    serialize_record,
    serialize_recorded_run,
    serialize_run,
    write_measurements,
)
from reports.records.run_info import Diagnosis, Extent, RunInfo, SimilarBug
from reports.records.run_record import (
    COMPLETE,
    DIGEST_OF,
    FAILED,
    INTERRUPTED,
    OWN_PROCESS,
    PROBE_SCHEMA,
    PROPOSAL_SCHEMA,
    RUN_SCHEMA,
    SHARD_PATTERN,
    CoveringArraySize,
    DeclarationTrial,
    End,
    Kernel,
    PlannedJob,
    Proposal,
    Query,
    RecordedRun,
    Run,
    list_differences,
)
from reports.records.strict_json import serialize_strict_json
