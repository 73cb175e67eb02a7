"""Ask what a function computes, one question after another, and collect the answers in a recipe."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import FEATURES, Case
from cases.masks import Causal, Full
from cases.operand_values import DTYPES, draw_problem
from cases.parameter_names import is_tuning
from conformance.adaptation import encodings
from conformance.adaptation.encodings import Encoding
from conformance.adaptation.modules import CannotAdapt
from conformance.adaptation.probing import APART, Outcome, Prober, is_refusal
from conformance.adaptation.program_arithmetic import read_arithmetic
from conformance.adaptation.recipe import LAYOUTS, Layout, Recipe, load_adapter
from conformance.adaptation.returned_arrays import describe_result, find_out, iter_outs, iter_residuals
from conformance.adaptation.sizes import SIZES, Size
from conformance.adaptation.target import Target
from conformance.execution import kernel_errors
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import compute_expectation
from impls.contract.declarations import Arithmetic

_PLACE = re.compile(r" \([^()]*\.py:\d+.*$")  # where an error was raised, at the end of its description
_INTERPRETED = (
    "from jax.experimental.pallas import tpu as pltpu",
    'if jax.default_backend() != "tpu":',
    "    pltpu.set_tpu_interpret_mode()",
)
"""Lines of an adapter's module that let a kernel for a TPU run without one."""
_DTYPES = ("dtype", "out_dtype", "logits_dtype")  # parameters that set the dtype of results or of logits
NONE_OF_THESE = "none of these"
CANNOT_TELL = "cannot be told apart"


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      question: what was asked, such as `window_size`.
      answer: what was found out.
      evidence: how far the answer's result is from the oracle, in bounds, and how far that of the next best reading.
      open: what people have to answer with yes before the answer counts as meant; empty if nothing else explains it.
    """

    question: str
    answer: str
    evidence: str = ""
    open: str = ""


_FIELDS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window": {"mask": "window-l3-r0"},
    "soft_cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "bias": {"bias": "bias"},
    "scale": {"scale": 0.31},
    "alibi_slopes": {"alibi": True},
}
"""The fields of a case that has an operand, for those that may be refused together."""


class Interview:
    """Asks questions about one function.

    Attributes:
      recipe: what is known so far.
      answers: the answers so far.
    """

    def __init__(
        self, target: Target, prober: Prober, on_answer: Callable[[Answer], None] = lambda answer: None
    ) -> None:
        self.target = target
        self.prober = prober
        self.recipe = Recipe(target)
        self.answers: list[Answer] = []
        self._on_answer = on_answer
        self._size = SIZES[0]
        self._dtype = "f32"

    def add_answer(self, question: str, answer: str, evidence: str = "", open: str = "") -> None:
        """Note an answer."""
        self.answers.append(Answer(question, answer, evidence, open))
        self._on_answer(self.answers[-1])

    def ask_all(self) -> None:
        """Ask all questions. Raises `CannotAdapt` if no call of the function returns something like attention."""
        self.ask_base_call()
        for operand in encodings.OPERANDS:
            self.ask_operand(operand)
        for ask in (
            self.ask_residuals,
            self.ask_heads,
            self.ask_lengths,
            self.ask_dtypes,
            self.ask_pairs,
            self.ask_cap_order,
            self.ask_gradients,
            self.ask_empty_rows,
            self.ask_hidden_memory,
            self.ask_arithmetic,
            self.ask_unpassed,
        ):
            if self.prober.is_out_of_time:
                asked = "the time was over before all questions were asked (--seconds): is the rest as in the contract?"
                self.add_answer("further questions", "not asked: the time is over", "", asked)
                return
            ask()

    def case(self, **changes: Any) -> Case:
        """Build a case of the sizes and dtype that the function was found to take."""
        return self._size.build_case(**{"dtype": self._dtype, "mask": self.get_mask(), **changes})

    def get_mask(self) -> str:
        """Return the mask of a plain call: none, or causal for a function that is always causal."""
        return _align(self.recipe, self._size, "causal") if self.recipe.is_causal else "full"

    # The base call: layout, scale by default, causal by default.

    def ask_base_call(self) -> None:
        """Find the layout, the scale by default, and whether the function is causal by default."""
        errors: dict[str, str] = {}
        if not self._find_base_call(errors) and any("interpret mode" in error for error in errors.values()):
            self.recipe = dataclasses.replace(self.recipe, setup=_INTERPRETED)
            errors = {}
            self._find_base_call(errors)
        if not self.answers:
            layouts = {error: layout for layout, error in reversed(errors.items())}  # each message once
            said = "; ".join(f"{layout}: {error}" for error, layout in list(layouts.items())[:4])
            raise CannotAdapt(f"no call of {self.target.name} returned a result like attention's: {said}")

    def _find_base_call(self, errors: dict[str, str]) -> bool:
        """Find a call without options that returns attention; returns whether there is one."""
        nearest: tuple[float, Recipe, Size, str] | None = None
        wrong: dict[tuple[str, str], Size] = {}
        for size, dtype in itertools.product(SIZES, ("f32", "bf16")):
            for recipe in self._list_base_recipes():
                found = self._try_base(recipe, size, dtype, errors)
                if found is None:
                    continue
                ratio, recipe, reading = found
                if ratio <= 4:
                    self._accept_base(recipe, size, dtype, reading, ratio, wrong.get((recipe.layout.axes, dtype)))
                    return True
                wrong.setdefault((recipe.layout.axes, dtype), size)
                if nearest is None or ratio < nearest[0]:
                    nearest = (ratio, recipe, size, dtype)
            if self.prober.is_out_of_time:
                break
        if nearest is None:
            return False
        ratio, self.recipe, self._size, self._dtype = nearest
        self.add_answer(
            "layout",
            f"{self.recipe.layout.axes}, by the shape of the result alone",
            f"{ratio:.3g} bounds from the oracle",
            f"a call without options equals no attention that was tried ({NONE_OF_THESE}). Is that meant?",
        )
        return True

    def _list_base_recipes(self) -> Iterator[Recipe]:
        target = self.target
        fixed = encodings.list_fixed_values(target)
        required = [
            name
            for name in target.parameters
            if name not in target.operands and target.is_required(name) and name not in target.bound
        ]
        values = [encodings.list_required_values(target, name) for name in required]
        for layout in LAYOUTS:
            for combination in itertools.islice(itertools.product(*values), 40):
                yield Recipe(
                    target,
                    layout,
                    fixed={**fixed, **dict(zip(required, combination, strict=True))},
                    setup=self.recipe.setup,
                )

    def _try_base(
        self, recipe: Recipe, size: Size, dtype: str, errors: dict[str, str]
    ) -> tuple[float, Recipe, tuple[str, str]] | None:
        """Call the function without options, and compare its result with attention of several scales and masks."""
        case = size.build_case(dtype=dtype)
        problem = draw_problem(case)
        axes = recipe.layout.axes
        try:
            result = jax.jit(load_adapter(recipe))(*(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)))
        except Exception as error:
            errors[axes] = kernel_errors.describe_kernel_error(error)
            return None
        fitting = list(iter_outs(result, size, axes))
        if not fitting:
            errors.setdefault(axes, f"returned {describe_result(result)}")
            return None
        best: tuple[float, tuple[str, str], str] = (math.inf, ("", ""), fitting[0][0])
        offset = size.kv_length - size.q_length
        masks = {"full": Full(), "start": Causal(0), **({"end": Causal(offset)} if offset else {})}
        for (mask, kind), scale in itertools.product(masks.items(), (None, 1.0)):
            asked = dataclasses.replace(problem, mask=kind, scale=scale)
            expected = compute_expectation(asked, Arithmetic(softmax="input", logits="input", scaled_q=True))
            for code, value in fitting:
                ratio = compare(np.asarray(value), expected.forward["out"]).ratio
                if ratio < best[0]:
                    best = (ratio, (mask, "" if scale is None else "1"), code)
        free = [n for n in _DTYPES if n in self.target.parameters and n not in {*recipe.fixed, *self.target.bound}]
        if best[0] > 4 and free:  # by default it computes in another dtype than that of its operands
            fixed = {**recipe.fixed, free[0]: "q.dtype"}
            return self._try_base(dataclasses.replace(recipe, fixed=fixed, out="result"), size, dtype, errors)
        return best[0], dataclasses.replace(recipe, out=best[2], plain_out=best[2]), best[1]

    def _accept_base(
        self, recipe: Recipe, size: Size, dtype: str, reading: tuple[str, str], ratio: float, wrong: Size | None
    ) -> None:
        """Keep the recipe of a call that returned attention; `wrong` are sizes at which it returned something else."""
        mask, scale = reading
        self._size, self._dtype, self.recipe = size, dtype, recipe
        evidence = f"{ratio:.2g} bounds from the oracle"
        asked = ""
        if wrong is not None and wrong != size:
            asked = f"a plain call is right with {size.describe()}, and wrong with {wrong.describe()}. Is that meant?"
        self.add_answer("layout", f"{recipe.layout.axes}{_describe_mapped(recipe.layout)}", evidence, asked)
        if value := ", ".join(f"{name}={code}" for name, code in recipe.fixed.items()):
            guessed = [name for name in recipe.fixed if encodings.is_guess(self.target, name)]
            asked = f"{', '.join(guessed)}: the value in each call is a guess. Is it meant?" if guessed else ""
            if narrow := [name for name in _DTYPES if name in recipe.fixed and not self.target.is_required(name)]:
                asked = (
                    f"by default results or logits have another dtype; {narrow[0]}=q.dtype is passed. Is that meant?"
                )
            self.add_answer("arguments in each call", value, "", asked)
        parameters = self.target.find_parameters("scale")
        if scale and not parameters:
            self.recipe = dataclasses.replace(self.recipe, scales_q=True)
            self.add_answer(
                "scale",
                "none: callers multiply queries by it",
                evidence,
                "logits are not scaled, as in splash attention, whose callers scale q. Is that meant?",
            )
        elif scale and self.target.get_default(parameters[0]) != 1:
            self.add_answer(
                "scale by default", "1", evidence, "the scale by default is 1, not 1 / sqrt(H). Is that meant?"
            )
        if scale and parameters:
            self._fix(parameters[0], "q.shape[-1] ** -0.5")
        causal = self.target.find_parameters("causal")
        if mask != "full" and causal:
            self._fix(causal[0], "False")
        elif mask != "full":
            self.recipe = dataclasses.replace(self.recipe, is_causal=True).lack("full", "always causal")
            open_question = "the function is causal in every call. Is that meant?"
            if mask == "end":
                self.recipe = self.recipe.declare(causal="end")
                open_question = "the function is causal in every call, last query at the last key. Is that meant?"
            self.add_answer("mask", f"always causal, aligned at the {mask}", evidence, open_question)

    def _fix(self, parameter: str, code: str) -> None:
        """Pass a value in each call, until it is known how to pass the operand."""
        self.recipe = dataclasses.replace(self.recipe, fixed={**self.recipe.fixed, parameter: code})

    # Operands.

    def ask_operand(self, operand: str) -> None:
        """Find out how the function takes an operand, if it has a parameter for it."""
        options = encodings.list_encodings(self.target, operand)
        if not options or self.prober.is_out_of_time:
            return
        name = "/".join(self.target.find_parameters(operand))
        passing: dict[str, tuple[Encoding, Outcome]] = {}
        ratios: dict[str, float] = {}
        errors: list[Outcome] = []
        for encoding in options:
            if encoding.reading in passing or (encoding.is_fallback and passing):
                continue
            if passing and encoding.reading in ratios:
                continue  # another form of a reading that is known to be far away
            outcome = self._try_encoding(operand, encoding)
            if outcome is None:
                continue
            if outcome.passes:
                passing[encoding.reading] = (encoding, outcome)
            elif outcome.ratios:
                ratios[encoding.reading] = min(ratios.get(encoding.reading, math.inf), outcome.ratio)
            else:
                errors.append(outcome)
        adoptable = {reading: one for reading, one in passing.items() if one[0].is_known}
        if adoptable:
            reading, (encoding, outcome) = next(iter(adoptable.items()))
            others = [ratio for other, ratio in ratios.items() if other != reading]
            evidence = f"{outcome.ratio:.2g} bounds from the oracle"
            if others:
                evidence += f"; the next best reading {min(others):.3g}"
            asked = encoding.question
            # A function may take both booleans and numbers to be added as its mask.
            rivals = [
                one.says
                for other, (one, _) in passing.items()
                if other != reading and not one.is_fallback and not other.startswith("added")
            ]
            close = others and min(others) < APART
            if (rivals or close) and not (operand == "causal" and self._size.q_length == self._size.kv_length):
                asked = asked or f"{name}: {CANNOT_TELL} by these calls: {encoding.says}; {'; '.join(rivals)}"
            if (encoding.gives or operand) in self.recipe.encodings:
                asked = (
                    f"{name} is a second parameter for {encoding.gives or operand}, and is never passed. Is that meant?"
                )
                self.add_answer(name, encoding.says, evidence, asked)
                return
            self.recipe = self.recipe.add(operand, encoding)
            self.add_answer(name, encoding.says, evidence, asked)
            self._ask_forms(operand, encoding.gives or operand)
            return
        self._note_failure(operand, name, options, passing, ratios, errors)

    def _try_encoding(self, operand: str, encoding: Encoding) -> Outcome | None:
        """Call the function with the operand passed in one way; None if the adapter takes no case that has it."""
        recipe = self.recipe.add(operand, encoding)
        worst: Outcome | None = None
        for changes in self._list_cases(operand, encoding, recipe):
            outcome = self.prober.probe(recipe, self.case(**changes))
            if outcome.unsupported:
                continue
            if worst is None or not outcome.ratios or outcome.ratio > worst.ratio:
                worst = outcome
            if not outcome.passes:
                return worst
        if worst is None:
            return None
        without = self.prober.probe(
            recipe, self.case(**{"kv_length": self._size.q_length} if encoding.reading == "equal lengths" else {})
        )
        return worst if without.unsupported or without.passes else without

    def _list_cases(self, operand: str, encoding: Encoding, recipe: Recipe) -> list[dict[str, Any]]:
        """List what cases ask about an operand: changes of the fields of the plain case."""
        size, kv_length = self._size, self._size.kv_length
        if operand == "causal":
            if encoding.reading == "equal lengths":
                return [{"mask": "causal", "kv_length": size.q_length}]
            return [{"mask": _align(recipe, size, "causal")}]
        if operand == "window":
            sides = ("l3-r2", "linf-r2", "l3-rinf", "l3-r0", "l3-r3")
            return [{"mask": _align(recipe, size, f"window-{one}")} for one in sides]
        if operand == "mask" and not encoding.gives:
            return [{"mask": "dense-d40"}]
        if operand in ("mask", "kv_lengths"):
            return [{"mask": f"lengths-{kv_length}-{kv_length // 2}"}]
        if operand == "bias":
            return [{"bias": "bias"}, *([{"bias": "bias", "scale": 0.31}] if "scale" in recipe.parameters else [])]
        if operand == "segment_ids":
            return [{"segments": "seg"}, {"segments": "seg", "kv_length": size.q_length}, {"segments": "segwild"}]
        fields: dict[str, dict[str, Any]] = {"scale": {"scale": 0.31}, "soft_cap": {"soft_cap": 3.0}}
        return [fields.get(operand, {"sinks": True} if operand == "sinks" else {"alibi": True})]

    def _note_failure(
        self,
        operand: str,
        name: str,
        options: list[Encoding],
        passing: Mapping[str, tuple[Encoding, Outcome]],
        ratios: Mapping[str, float],
        errors: list[Outcome],
    ) -> None:
        """Note that an operand is taken in no known way; the adapter passes it in the likeliest one, to be judged."""
        if (ratios or errors) and self._find_at_other_sizes(operand, name, options):
            return
        if ratios:
            usual = next((one for one in options if one.reading in ratios and one.is_known), options[0])
            self.recipe = self.recipe.add(operand, usual)
            near = "; ".join(f"equals {one[0].says}, which no known library does" for one in passing.values())
            evidence = f"at best {min(ratios.values()):.3g} bounds from the oracle"
            asked = f"{name}: results are those of no known reading{': ' + near if near else ''}. Is that meant?"
            self.add_answer(name, NONE_OF_THESE, evidence, asked)
            return
        if not errors or all(one.is_refusal for one in errors):
            reason = _shorten(errors[0].error) if errors else "not implemented"
            asked = f"{name} was refused in every form that was tried ({reason}), so it is never judged. Is that meant?"
            self.add_answer(name, "refused", reason, asked)
            return
        outcome = errors[0]
        asked = f"every call with {name} raises, so it is never passed. Is that meant?"
        self.add_answer(name, "raises", outcome.error, asked)

    def _find_at_other_sizes(self, operand: str, name: str, options: list[Encoding]) -> bool:
        """Look for a reading that is right at other lengths, as where lengths must be equal or a tail is wrong."""
        usual = self._size
        for size in SIZES[1:4]:
            self._size = size
            for encoding in (one for one in options if one.is_known and not one.is_fallback):
                outcome = self._try_encoding(operand, encoding)
                if outcome is None or not outcome.passes:
                    continue
                self._size = usual
                self.recipe = self.recipe.add(operand, encoding)
                lengths = size.describe()
                asked = f"{name} is right with {lengths}, and wrong or refused with {usual.describe()}. Is that meant?"
                self.add_answer(
                    name, encoding.says, f"{outcome.ratio:.2g} bounds from the oracle with {lengths}", asked
                )
                return True
        self._size = usual
        return False

    def _ask_forms(self, operand: str, given: str) -> None:
        """Ask which kinds of an operand the function takes: masks by head and batch row, wider biases."""
        if operand == "mask" and given == "mask":
            for mask, feature in (("densebatch-d40", "dense_batch"), ("densehead-d40", "dense_head")):
                self._ask_feature(feature, FEATURES[feature], mask=mask)

    def _ask_feature(self, feature: str, question: str, **changes: Any) -> None:
        """Ask whether the function takes calls with a feature, and declare it unsupported if they raise."""
        outcome = self.prober.probe(self.recipe, self.case(**changes))
        self._answer_feature(question, outcome)
        if outcome.error:
            self.recipe = self.recipe.lack(feature, _shorten(outcome.error))

    def _answer_feature(self, question: str, outcome: Outcome) -> None:
        if outcome.error:
            reason = _shorten(outcome.error)
            asked = "" if outcome.is_refusal else f"{question}: calls raise {reason}. Is that meant?"
            self.add_answer(question, "refused" if outcome.is_refusal else "raises", reason, asked)
        elif outcome.ratios and not outcome.passes:
            evidence = f"{outcome.ratio:.3g} bounds from the oracle"
            asked = f"{question}: results are not those of attention. Is that meant?"
            self.add_answer(question, NONE_OF_THESE, evidence, asked)
        elif outcome.ratios:
            self.add_answer(question, "yes", f"{outcome.ratio:.2g} bounds from the oracle")

    # What comes back beside `out`.

    def ask_residuals(self) -> None:
        """Find the logsumexp and the largest logit among what the function returns, and their formulas."""
        flags = self.target.find_parameters("save_residuals")
        for flag in (*flags, ""):
            fixed = {**self.recipe.fixed, **({flag: "True"} if flag else {})}
            raw = dataclasses.replace(self.recipe, fixed=fixed, out="result")
            if self._find_residuals(raw, flag):
                return
        if flags:
            asked = f"{flags[0]}=True returns no logsumexp that is known. Is that meant?"
            self.add_answer("/".join(flags), NONE_OF_THESE, "", asked)

    def _find_residuals(self, raw: Recipe, flag: str) -> bool:
        case = self.case()
        problem = draw_problem(case)
        options = {"causal": True} if self.recipe.is_causal else {}
        try:
            call = functools.partial(load_adapter(raw), **options)
            result = jax.jit(call)(*(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)))
        except Exception as error:
            if flag:
                self.add_answer(flag, "raises", kernel_errors.describe_kernel_error(error))
            return False
        found = find_out(result, self._size, self.recipe.layout.axes)
        if found is None:
            return False
        expected = compute_expectation(problem, Arithmetic()).forward
        residuals: dict[str, str] = {}
        base_two = False
        for code, x in iter_residuals(result, self._size):
            for name in ("logsumexp", "max_logits"):
                bounded = expected[name]
                if name not in residuals and compare(x, bounded).ratio <= 4:
                    residuals[name] = code
            if "logsumexp" not in residuals:
                two = dataclasses.replace(expected["logsumexp"], value=expected["logsumexp"].value / math.log(2))
                if compare(x, two).ratio <= 8:
                    residuals["logsumexp"], base_two = code, True
        known = " ".join(residuals.values())
        others = [code for code, x in iter_residuals(result, self._size) if " + " not in code and code not in known]
        if others and "logsumexp" not in residuals:
            asked = f"{', '.join(others)} has the shape of a logsumexp, and is none that is known. Is that meant?"
            self.add_answer(flag or "what it returns", NONE_OF_THESE, "", asked)
        if not residuals:
            return bool(others)
        name = flag or "what it returns"
        self.recipe = dataclasses.replace(self.recipe, residuals=residuals, flag=flag, out=found[0])
        if flag:
            fixed = {name: code for name, code in self.recipe.fixed.items() if name != flag}
            self.recipe = dataclasses.replace(self.recipe, fixed=fixed, plain_out=self._find_plain_out(raw, flag))
        asked = ""
        if base_two:
            self.recipe = self.recipe.declare(logsumexp_base=2)
            asked = "logsumexp is in base 2, as in FlashInfer. Is that meant?"
        self.add_answer(
            name, f"{' and '.join(residuals)}{', in base 2' if base_two else ''}", residuals.get("logsumexp", ""), asked
        )
        if "logsumexp" in residuals and "sinks" in self.recipe.parameters:
            self._ask_declaration("logsumexp with sinks", "residuals", {"sinks": True}, logsumexp_sink=False)
        return True

    def _find_plain_out(self, raw: Recipe, flag: str) -> str:
        """Return the code that brings what a call without residuals returns to `out`."""
        problem = draw_problem(self.case())
        without = dataclasses.replace(raw, fixed={**raw.fixed, flag: "False"}, plain_out="result")
        try:
            result = jax.jit(load_adapter(without))(*(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)))
        except Exception:  # a check reports what the call raises
            return self.recipe.plain_out
        found = find_out(result, self._size, self.recipe.layout.axes)
        return self.recipe.plain_out if found is None else found[0]

    def _ask_declaration(self, question: str, results: str, changes: dict[str, Any], **declared: Any) -> None:
        """Ask whether results are those of the contract, or those of a declaration."""
        plain = self.prober.probe(self.recipe, self.case(**changes), results)
        if plain.unsupported:
            return
        if plain.passes:
            self.add_answer(question, "as in the contract", f"{plain.ratio:.2g} bounds from the oracle")
            return
        other = self.recipe.declare(**declared)
        outcome = self.prober.probe(other, self.case(**changes), results)
        said = ", ".join(f"{name}={value!r}" for name, value in declared.items())
        if outcome.passes:
            self.recipe = other
            evidence = f"{outcome.ratio:.2g} bounds from the oracle; that of the contract {plain.ratio:.3g}"
            self.add_answer(question, said, evidence, f"{question}: {said}. Is that meant?")
        else:
            error = plain.error or f"{plain.ratio:.3g} bounds from the oracle"
            self.add_answer(
                question,
                NONE_OF_THESE if plain.ratios else "raises",
                error,
                f"{question}: results are not those of attention. Is that meant?",
            )

    # Which calls it takes.

    def ask_heads(self) -> None:
        """Ask whether the function takes fewer key heads, and values of another depth."""
        heads, depth = self._size.heads, self._size.depth
        self._ask_feature("gqa", "fewer key heads", num_q_heads=2 * heads)
        self._ask_feature("mqa", "one key head", num_kv_heads=1)
        self._ask_sides(
            "v_head_dim",
            ("values deeper than keys", {"v_head_dim": 2 * depth}, "v.shape[3] > q.shape[3]"),
            ("values less deep than keys", {"v_head_dim": depth // 2}, "v.shape[3] < q.shape[3]"),
        )

    def ask_lengths(self) -> None:
        """Ask which lengths the function takes."""
        q_length, kv_length = self._size.q_length, self._size.kv_length
        longest = max(q_length, kv_length)
        fewer = {"kv_length": 2 * q_length} if q_length == kv_length else {}
        more = {"q_length": 2 * longest, "kv_length": longest}
        self._ask_sides(
            "unequal_lengths",
            ("fewer queries than keys", fewer, "q.shape[1] < k.shape[1]"),
            ("more queries than keys", more, "q.shape[1] > k.shape[1]"),
        )
        single = dataclasses.replace(self._size, q_length=1)
        mask = _align(self.recipe, single, "causal") if self.recipe.is_causal else "full"
        self._ask_feature("decode", "a single query", phase="decode", q_length=1, mask=mask)
        self._ask_multiples()

    def _ask_sides(self, feature: str, *sides: tuple[str, dict[str, Any], str]) -> None:
        """Ask about a feature that has two sides; if only one side raises, the adapter refuses it and no more.

        Args:
          feature: the feature that is declared unsupported if calls of both sides raise.
          *sides: for each side its name, the changes of the plain case, and the code of a condition that it fulfils.
        """
        raised = {}
        for question, changes, condition in sides:
            outcome = self.prober.probe(self.recipe, self.case(**changes))
            self._answer_feature(question, outcome)
            if outcome.error:
                raised[condition] = (question, _shorten(outcome.error))
        if len(raised) == len(sides):
            self.recipe = self.recipe.lack(feature, next(iter(raised.values()))[1])
            return
        for condition, (question, _) in raised.items():
            self._refuse(condition, f"{question}: refused")

    def _refuse(self, condition: str, message: str) -> None:
        """Let the adapter refuse calls that fulfil a condition."""
        lines = (f"if {condition}:", f'    raise NotImplementedError("{message}")')
        self.recipe = dataclasses.replace(self.recipe, refusals=(*self.recipe.refusals, *lines))

    def _ask_multiples(self) -> None:
        """Find lengths that the function refuses, by tracing it."""

        def takes(length: int) -> BaseException | None:
            size = dataclasses.replace(self._size, q_length=length, kv_length=length)
            return self._trace(size)

        lengths = (5, 12, 72, 100, 200, 300)
        failed = {length: error for length in lengths if (error := takes(length)) is not None}
        if not failed:
            self.add_answer("lengths", "any", "traced at 5, 12, 72, 100, 200 and 300")
            return
        length, error = next(iter(failed.items()))
        reason = _shorten(kernel_errors.describe_kernel_error(error))
        asked = (
            ""
            if is_refusal(error, self.target.function)
            else f"lengths such as {length} raise {reason}. Is that meant?"
        )

        def takes_multiples(b: int) -> bool:
            """Return whether it takes multiples of `b`, beyond 512 too."""
            return all(takes(n * b) is None for n in (3, 5, 512 // b + 1))

        small = 5 not in failed
        usual = (self._size.q_length, self._size.kv_length)
        blocks = [b for b in (2, 4, 8, 16, 32, 64, 128, 256, 512) if small or not any(n % b for n in usual)]
        block = next((b for b in blocks if takes_multiples(b)), 0)
        if not block:
            asked = asked or f"lengths such as {length} raise {reason}. Is that meant?"
            self.add_answer("lengths", f"not {length}", reason, asked)
            return
        said = f"multiples of {block}" + (", or shorter" if small else "")
        divisor = f"min({block}, n)" if small else str(block)
        self._refuse(f"any(n % {divisor} for n in (q.shape[1], k.shape[1]))", f"lengths are {said}")
        self.add_answer("lengths", said, reason, asked)

    def _trace(self, size: Size) -> BaseException | None:
        """Trace a plain call of these sizes; returns the exception that it raises."""
        shapes = [(size.batch, n, size.heads, size.depth) for n in (size.q_length, size.kv_length, size.kv_length)]
        operands = [jax.ShapeDtypeStruct(shape, DTYPES[self._dtype]) for shape in shapes]
        try:
            jax.eval_shape(load_adapter(self.recipe), *operands)
        except Exception as error:
            return error
        return None

    def ask_dtypes(self) -> None:
        """Ask which dtypes the function takes."""
        for dtype in ("f32", "bf16", "f16"):
            if dtype == self._dtype:
                continue
            outcome = self.prober.probe(self.recipe, self.case(dtype=dtype))
            if outcome.error and outcome.is_refusal:
                self.recipe = self.recipe.lack(dtype, _shorten(outcome.error))
                self.add_answer(dtype, "refused", _shorten(outcome.error))
            elif outcome.error:
                asked = f"{dtype} raises {_shorten(outcome.error)}. Is that meant?"
                self.add_answer(dtype, "raises", _shorten(outcome.error), asked)
            elif dtype == "f32" and outcome.ratios and not outcome.passes:
                evidence = f"{outcome.ratio:.3g} bounds from the oracle"
                asked = "f32: results are not within the bounds of f32. Is that meant?"
                self.add_answer(dtype, NONE_OF_THESE, evidence, asked)

    def ask_pairs(self) -> None:
        """Ask which two operands the function refuses together, by tracing it."""
        names = [name for name in self.recipe.parameters if name in _FIELDS]
        for one, other in itertools.combinations(names, 2):
            changes = {**_FIELDS[one], **_FIELDS[other]}
            if {one, other} <= {"causal", "window"}:
                continue
            error = self.prober.trace(self.recipe, self.case(**changes))
            if error is None or not is_refusal(error, self.target.function):
                continue
            reason = _shorten(kernel_errors.describe_kernel_error(error))
            condition = f"{_write_given(one)} and {_write_given(other)}"
            self._refuse(condition, f"{one} and {other} are not taken together")
            self.add_answer(f"{one} and {other}", "refused together", reason)

    def ask_cap_order(self) -> None:
        """Ask whether the soft cap comes before or after the bias."""
        if {"soft_cap", "bias"} <= set(self.recipe.parameters):
            changes = {"soft_cap": 2.0, "bias": "bias"}
            self._ask_declaration("soft cap and bias", "out", changes, soft_cap="before_bias")

    # Gradients, empty rows, hidden memory, arithmetic.

    def ask_gradients(self) -> None:
        """Ask for gradients of out and of logsumexp."""
        outcome = self.prober.probe(self.recipe, self.case(), "gradients")
        if outcome.error or outcome.unsupported:
            reason = _shorten(outcome.error or outcome.unsupported)
            self.recipe = self.recipe.declare(gradients=())
            self.add_answer("gradients", "none", reason, f"it has no gradients: {reason}. Is that meant?")
            return
        wrong = [name for name, ratio in outcome.ratios.items() if ratio > 4]
        said = f"{', '.join(wrong)} wrong" if wrong else "of q, k and v"
        self.add_answer("gradients", said, f"{outcome.ratio:.2g} bounds from the oracle")
        if "logsumexp" not in self.recipe.residuals:
            return
        outcome = self.prober.probe(self.recipe, self.case(), "gradients_lse")
        if outcome.passes:
            self.add_answer("gradient of logsumexp", "yes", f"{outcome.ratio:.2g} bounds from the oracle")
        elif not wrong:
            self.recipe = self.recipe.declare(differentiable_residuals=False)
            said = outcome.error or f"{outcome.ratio:.3g} bounds from the oracle"
            asked = "" if outcome.is_refusal else "logsumexp has no right gradient. Is it meant to have none?"
            self.add_answer("gradient of logsumexp", "none", said, asked)

    def ask_empty_rows(self) -> None:
        """Find out what a query that may attend to no key gets."""
        changes = self._find_case_with_empty_rows()
        if changes is None:
            return
        results = "residuals" if "logsumexp" in self.recipe.residuals else "out"
        for kind in ("zero", "mean"):
            recipe = self.recipe.declare(empty_rows=kind)
            outcome = self.prober.probe(recipe, self.case(**changes), "out")
            if outcome.unsupported:
                return
            if outcome.passes:
                self.recipe = recipe
                self.add_answer("empty rows", kind, f"{outcome.ratio:.2g} bounds from the oracle")
                if kind == "zero" and results == "residuals":
                    question = "logsumexp of empty rows"
                    self._ask_declaration(question, results, changes, logsumexp_empty="inf")
                return
        said = "neither zero nor the mean of all values"
        self.add_answer(
            "empty rows", said, outcome.error, f"a query that may attend to no key gets {said}. Is that meant?"
        )

    def _find_case_with_empty_rows(self) -> dict[str, Any] | None:
        parameters = self.recipe.parameters
        q_length, kv_length = self._size.q_length, self._size.kv_length
        if "kv_lengths" in parameters:
            return {"mask": f"lengths-{kv_length}-0"}
        if "segment_ids" in parameters and q_length != kv_length:
            return {"segments": "segpad"}
        if "mask" in parameters:
            return {"mask": "dense-d40"}
        if self.recipe.declarations.get("causal") == "end" and "unequal_lengths" not in self.recipe.unsupported:
            return {"mask": f"causal-o-{kv_length}", "q_length": 2 * kv_length}
        return None

    def ask_hidden_memory(self) -> None:
        """Ask whether keys and values that no query may attend to may be NaN."""
        q_length, kv_length = self._size.q_length, self._size.kv_length
        half = kv_length // 2
        cases = []
        if {"kv_lengths", "mask"} & set(self.recipe.parameters):
            cases.append({"mask": f"lengths-{half}-{half}"})
        if (
            "causal" in self.recipe.parameters
            and self.recipe.declarations.get("causal") != "end"
            and q_length < kv_length
        ):
            cases.append({"mask": "causal"})
        if "window" in self.recipe.parameters and q_length < kv_length:
            cases.append({"mask": _align(self.recipe, self._size, "window-l3-r0")})
        judged = 0
        for changes in cases:
            outcome = self.prober.probe(self.recipe, self.case(**changes), "poison")
            judged += bool(outcome.ratios)
            if outcome.passes or not outcome.ratios:
                continue
            self.recipe = self.recipe.declare(behind_mask="finite")
            asked = "NaN in keys and values that no query may attend to reaches results. Must callers keep them finite?"
            self.add_answer(
                "hidden keys and values", "must be finite", f"NaN reached out under {changes['mask']}", asked
            )
            return
        if judged:
            self.add_answer("hidden keys and values", "may be NaN")

    def ask_arithmetic(self) -> None:
        """Read from the program in bf16 what is rounded to the operands' dtype, and try it."""
        dtype = next((name for name in ("bf16", "f16") if name not in self.recipe.unsupported), None)
        if dtype is None:
            return
        found = read_arithmetic(load_adapter(self.recipe), self.case(dtype=dtype), self.recipe)
        if found:
            declared = {name: value for name, (value, _) in found.items()}
            self.recipe = self.recipe.declare(**declared)
            said = ", ".join(f"{name}={value!r}" for name, value in declared.items())
            why = "; ".join(where for _, where in found.values())
            self.add_answer(f"arithmetic in {dtype}", said, why, f"{said}: {why}. Is that meant?")
        outcome = self.prober.probe(self.recipe, self.case(dtype=dtype))
        if outcome.ratios:
            self.add_answer(
                f"out in {dtype}",
                "within its bounds" if outcome.passes else "out of its bounds",
                f"{outcome.ratio:.2g} bounds from the oracle",
            )

    def ask_unpassed(self) -> None:
        """Name the parameters to which the adapter passes nothing."""
        passed = {*self.recipe.fixed, *self.target.bound, *self.target.operands, self.recipe.flag}
        passed |= {name for encoding in self.recipe.encodings.values() for name in encoding.arguments}
        left = [name for name in self.target.parameters if name not in passed and not is_tuning(name)]
        asked_about = {name for answer in self.answers if answer.open for name in answer.question.split("/")}
        operands = [name for name in left if name in self.target.roles and name not in asked_about]
        if left:
            asked = f"{', '.join(operands)}: never passed. Is that meant?" if operands else ""
            self.add_answer("never passed", ", ".join(left), "", asked)
        if self.target.has_options:
            asked = "it takes **options, of which none was passed. Is that meant?"
            self.add_answer("**options", "nothing in them was asked", "", asked)


def _align(recipe: Recipe, size: Size, spec: str) -> str:
    """Return a mask spec with the offset of the alignment that a recipe declares."""
    offset = size.kv_length - size.q_length
    return f"{spec}-o{offset}" if recipe.declarations.get("causal") == "end" and offset else spec


def _write_given(operand: str) -> str:
    return operand if operand == "causal" else f"{operand} is not None"


def _describe_mapped(layout: Layout) -> str:
    names = {"B": "batch rows", "N": "heads"}
    return f", mapped over {' and '.join(names[one] for one in layout.mapped)}" if layout.mapped else ""


def _shorten(text: str, most: int = 70) -> str:
    """Return the first line of a message without the place of the error."""
    text = _PLACE.sub("", text.split("\n")[0])
    return text if len(text) <= most else f"{text[: most - 1]}…"
