"""Hold the longer help texts of the command line: descriptions, examples, exit codes."""

from __future__ import annotations

DESCRIPTION = """\
Is an attention implementation right? Judge its forward pass, its residuals and every gradient against a float64 oracle,
element by element, within rounding-error bounds derived for the arithmetic it declares.
"""

EXAMPLES = """\
examples:
  python -m conformance run --impl=my_kernels.flash:attention --report=report.html
  python -m conformance run --impl=kernel.py:attention --cases='train/bf16/*/causal' --level=standard
  python -m conformance run --impl=block_flash --case=train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0
  python -m conformance run --impl=kernel.py:attention --level=smoke --shrink
  python -m conformance run --impl=kernel.py:workload --problem=paged_attention
  python -m conformance explore --impl=my_kernels.flash:attention --seconds=300
  python -m conformance list cases --cases='*/softcap*'
  python -m conformance explain train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s7

exit codes: 0 conforms, 1 does not, 2 could not be judged (bad arguments, import failure, nothing supported),
130 and 143 stopped by Ctrl-C and by SIGTERM
"""

ADAPT = """\
Find out what an attention function computes: order of axes, scale, alignment of the causal mask, meaning of windows,
masks and soft caps, what it returns, which gradients it has, what it rounds. It is called on small operands, one
question at a time, and each result is compared with every reading that a library has. It runs in this process, without
a sandbox. An answer that a bug would explain as well is an open question. The adapter is a plain function of the
contract's signature, with what was found out in `@declare(...)`.
"""

ADAPT_EXAMPLES = """\
examples:
  python -m conformance adapt --impl=jax.nn:dot_product_attention
  python -m conformance adapt --impl=flash.py:flash_attention --write=flash_adapter.py
  python -m conformance adapt --impl=my_package.ops:attention --set=implementation=xla
  python -m conformance run --impl=flash.py:flash_attention --adapt      # adapt it, and judge the adapter
exit codes: 0 nothing is open, 1 questions are open, 2 the function could not be adapted
"""

EXPLORE = """\
Draw cases beyond the grid (any lengths, depths, head counts, combinations of masks and operands), judge each, and
shrink the first that is wrong to the smallest case that is wrong in the same way. The id of that case is enough
to judge it again.
"""

EXPLORE_EXAMPLES = """\
examples:
  python -m conformance explore --impl=my_kernels.flash:attention
  python -m conformance explore --impl=kernel.py:attention --seconds=600 --report=explored.html
  python -m conformance explore --impl=kernel.py:attention --cases='train/bf16/*/causal'
  python -m conformance explore --impl=kernel.py:attention --profile=ci      # the same cases every time

profiles:
  explore   until a case is wrong or the time is up, from a seed that is drawn and printed
  ci        a fixed number of cases from seed 0, however long they take

exit codes: 0 nothing wrong was found, 1 a wrong case was found, 2 could not be judged, 130 and 143 stopped by a signal
"""

SERVE = """\
Keep a process with JAX loaded, for editing a kernel and judging it again and again. While it runs, `run` and `explore`
in other terminals use it. It also keeps what does not depend on the kernel's code (exact results and their bounds), and
compiled programs that an edit did not change. Kernels are imported anew in each run, in a sandbox, as always. Start it
again after changing installed packages.
"""

SERVE_EXAMPLES = """\
examples:
  python -m conformance serve                                    # in one terminal, or
  python -m conformance serve &                                  # in the background, until `kill %1`
  python -m conformance run --impl=kernel.py:attention --level=smoke     # in another, after each edit

exit codes: 0 ended by Ctrl-C, 2 could not serve
"""

LIST_EXAMPLES = """\
examples:
  python -m conformance list                                     # implementations
  python -m conformance list checks
  python -m conformance list cases --cases='train/bf16/*/causal' --level=standard
  python -m conformance list cases --impl=my_kernels.flash:attention

exit codes: 0 listed, 2 bad arguments or nothing matches
"""

EXPLAIN_EXAMPLES = """\
examples:
  python -m conformance explain train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s7
  python -m conformance explain train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0 --impl=kernel.py:attention

exit codes: 0 explained, 2 not a case id, or the implementation cannot run or does not support the case
"""

REPORT_EXAMPLES = """\
examples:
  python -m conformance report cpu.jsonl gpu.jsonl --report=all.html
  python -m conformance report report.jsonl --json=findings.json
  python -m conformance report 1.jsonl 2.jsonl 3.jsonl --gate --report=all.html     # in CI, after the last shard

Runs of the same kernel with the same versions and declarations are merged, shards too. If two of them judge the same
result, the worse verdict counts. Runs that differ in kernel, version or declaration are shown side by side.
exit codes: 0 merged, 2 a file cannot be read or written
with --gate: 0 every implementation conforms, 1 one does not, 2 a shard is missing, or something was not judged
"""

CALIBRATE_EXAMPLES = """\
examples:
  python -m conformance calibrate --impl=block_flash --impl=dot_product --level=standard --seed=0 --seed=1 --seed=2
  python -m conformance calibrate block_flash.jsonl dot_product.jsonl

Limits are 1.5 times the largest ratio that a correct implementation reached, rounded up
(conformance/truth/tolerances.py).
exit codes: 0 written, 2 an implementation fails (so it is not correct), or a file cannot be read or written
"""

COMPARE_EXAMPLES = """\
examples:
  python -m conformance compare before.jsonl after.jsonl --report=changes.html
  python -m conformance compare 1.jsonl,2.jsonl,3.jsonl new1.jsonl,new2.jsonl,new3.jsonl

A regression is a new failure, a result that is newly unsupported or unjudged, or a judgement that is missing although
its case was planned. Ratios that changed more than other operand values would change them are shown, and are no
regression.
exit codes: 0 no regression, 1 a regression, 2 a file cannot be read or written
"""

EXPECT_EXAMPLES = """\
examples:
  python -m conformance expect report.jsonl >> pyproject.toml
  python -m conformance expect report.jsonl --impl=block_flash --all

There is one entry for each finding. Its pattern matches all failures of that finding, and as little else as one pattern
can. With --all there is one for each set of cases in which the same results fail, and less else is matched. If the
pattern also matches results that pass, the entry has `some = true`. You must fill in the reason: an entry without one
is refused.
exit codes: 0 printed, or nothing fails, 2 a file cannot be read
"""

COMPLETION_EXAMPLES = """\
examples:
  attention-conformance completion bash > ~/.local/share/bash-completion/completions/attention-conformance
  attention-conformance completion zsh > ~/.zfunc/_attention-conformance       # a folder of your fpath
  attention-conformance completion fish > ~/.config/fish/completions/attention-conformance.fish

Shells complete the command `attention-conformance`, which is the same as `python -m conformance`.
exit codes: 0 printed, 2 bad arguments
"""


def format_sentence(text: str) -> str:
    """Turn a help line into a sentence: begin with a capital, and end with a full stop."""
    return f"{text[0].upper()}{text[1:]}."
