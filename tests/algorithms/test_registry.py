"""Finding algorithms by name, path and entry point; parameter checks; every way in which a file can be wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Annotated, Literal

import msgspec
import pytest
import torch
from msgspec import Meta

from algorithms.base import Definition, ReturnAfterOne
from algorithms.registry import AlgorithmError, check_overrides, load, names, numeric_params, validate_params

BUILT_IN = {"none": {}, "entropy": {"threshold": 1}, "rstitch": {"tau": 0}, "bernoulli": {"p": 0}}
BUILT_IN["every_n"] = {"shape": "block", "n": 1}
BUILT_IN |= {"r2r": {"checkpoint": "r.pt"}, "citer": {"checkpoint": "c.pth"}, "collm": {}}

GOOD = """
    from __future__ import annotations

    from typing import Annotated

    import msgspec
    from msgspec import Meta

    from algorithms.base import Algorithm, Definition, ReturnAfterOne


    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        threshold: Annotated[float, Meta(ge=0, le=1)]


    class Small(Algorithm):
        def decide(self, token):
            return int(token.confidence < token.params["threshold"])


    ALGORITHM = Definition("mine", lambda side: Small if side == 0 else ReturnAfterOne, Params)
"""


class Pair(ReturnAfterOne):
    pass


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(ge=0, le=1, description="Share of tokens.")]
    count: Annotated[int, Meta(ge=1)] = 3
    level: Annotated[float, Meta(ge=0)] | Literal["auto"] = "auto"
    mode: Literal["a", "b"] = "a"
    loud: bool = False


def _weights(params: Params, models: tuple[str, ...]) -> None:
    if params.count > len(models):
        raise ValueError(f"count: at most {len(models)} here")


PAIR = Definition("pair", lambda _: Pair, Params, max_models=3, check=_weights)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="rule.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with one entry point on sys.path, as an installation would."""

    def install_package(dist, target, module="", text="", name="installed"):
        info = tmp_path / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[trouterd.algorithms]\n{name} = {target}\n")
        if module:
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(text))
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install_package


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_ins_are_named_as_their_files_and_take_their_parameters(name):
    definition = load(name)
    assert definition.name == name
    assert name in names()
    params = validate_params(definition, BUILT_IN[name], ["m"] * definition.min_models)
    assert set(numeric_params(params)) == set(params.__struct_fields__) - {
        *("measure", "back", "shape", "phases", "checkpoint", "dtype", "mode", "schedule"),
    }


def test_names_import_no_algorithm():
    script = "import sys, algorithms.registry as r; r.names(); print([m for m in sys.modules if 'rstitch' in m])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_modules_that_are_no_algorithm_have_no_name():
    assert not {"base", "registry", "uncertainty"} & set(names())
    with pytest.raises(AlgorithmError, match="unknown algorithm 'base'"):
        load("base")


def test_unknown_name_gets_a_suggestion_and_the_list():
    with pytest.raises(AlgorithmError, match=r"'entropi' \(did you mean 'entropy'\?\); known: bernoulli, .*rstitch"):
        load("entropi")


def test_file_by_absolute_and_relative_path(write, monkeypatch, tmp_path):
    path = write(GOOD, "rules/rule.py")
    for definition in (load(str(path)), load("rules/rule.py", tmp_path), load("./rules/rule.py", tmp_path)):
        assert definition.name == "mine"
        assert numeric_params(validate_params(definition, {"threshold": 0.5}, "ab")) == {"threshold": 0.5}
    monkeypatch.chdir(tmp_path / "rules")
    assert load("rule.py").name == "mine"


def test_two_files_of_one_name_stay_apart(write, tmp_path):
    write(GOOD, "a/rule.py")
    write(GOOD.replace('"mine"', '"other"'), "b/rule.py")
    first, second = load("a/rule.py", tmp_path), load("b/rule.py", tmp_path)
    assert (first.name, second.name) == ("mine", "other")
    assert first.params.__module__ != second.params.__module__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no `ALGORITHM = Definition"),
        ("ALGORITHM = 3", "must be an algorithms.base.Definition, not int"),
        ("def f(:\n    pass", r"rule\.py:1: SyntaxError"),
        ("\n\nimport no_such_module_anywhere", r"rule\.py:3: ModuleNotFoundError: .*no_such_module_anywhere"),
        ("import sys\nsys.exit(3)", r"rule\.py:2: SystemExit: 3$"),
        ("x = 1\ny = 1 / 0", r"rule\.py:2: ZeroDivisionError"),
        ("class Odd(Exception):\n    pass\nraise Odd('two\\nlines')", r"rule\.py:3: Odd: two lines$"),
        (
            GOOD.replace("lambda side: Small if side == 0 else ReturnAfterOne", "lambda side: 5"),
            r"sides\(0\) must give",
        ),
        (GOOD.replace("ReturnAfterOne, Params", "str, Params"), r"sides\(1\) must give .* not the class str"),
        (GOOD.replace("Small if side == 0", "[][side] if side == 0"), r"sides\(0\) failed: IndexError"),
        (GOOD.replace("def decide", "def decides"), r"Small defines neither route\(\) nor decide\(\)"),
        (GOOD.replace(", forbid_unknown_fields=True", ""), "Params must be frozen=True, forbid_unknown_fields=True"),
        (GOOD.replace(", Params)", ", dict)"), "params must be a msgspec.Struct class, not the class dict"),
        (GOOD.replace(", Params)", ", Params, 3, 2)"), "1 <= min_models <= max_models"),
    ],
)
def test_bad_files_are_named_with_what_is_missing(write, text, message):
    path = write(text)
    with pytest.raises(AlgorithmError, match=message) as caught:
        load(str(path))
    assert str(caught.value).startswith(str(path))


def test_missing_and_odd_files(write, tmp_path):
    with pytest.raises(AlgorithmError, match=r"gone\.py: no such file"):
        load("gone.py", tmp_path)
    write("x = 1", "rule.txt")
    with pytest.raises(AlgorithmError, match="not a Python file"):
        load("./rule.txt", tmp_path)


@pytest.mark.parametrize("target", ["plugin_rule", "plugin_rule:ALGORITHM"])
def test_entry_point_of_an_installed_package(install, target):
    install("plugin", target, "plugin_rule", GOOD)
    assert "installed" in names()
    assert load("installed").name == "mine"


def test_broken_entry_points(install):
    install("plugin", "plugin_gone:X")
    with pytest.raises(
        AlgorithmError, match=r"'installed' \(plugin_gone:X\) of plugin cannot be loaded: ModuleNotFound"
    ):
        load("installed")
    install("second", "plugin_gone:Y")
    with pytest.raises(AlgorithmError, match="several packages: .*; uninstall all but one"):
        load("installed")


def test_a_built_in_is_not_replaced_by_an_entry_point(install):
    install("plugin", "plugin_rule:ALGORITHM", "plugin_rule", GOOD, name="entropy")
    assert load("entropy").name == "entropy"


def test_parameters_are_converted_and_defaults_filled_in():
    params = validate_params(PAIR, {"share": 1, "count": 2}, "ab")
    assert params == Params(share=1.0, count=2)
    assert numeric_params(params) == {"share": 1.0, "count": 2.0}
    assert numeric_params(Params(share=0.5, level=0.25)) == {"share": 0.5, "count": 3.0, "level": 0.25}


def test_the_largest_number_is_one_that_rows_carry():
    largest = torch.finfo(torch.float32).max
    numbers = numeric_params(validate_params(PAIR, {"share": 1, "count": 1, "level": largest}, "ab"))
    assert torch.full((1,), numbers["level"]).item() == largest


@pytest.mark.parametrize(
    ("params", "key", "message"),
    [
        ({}, "share", r"'pair' needs the parameter 'share': Share of tokens\."),
        ({"share": 2}, "share", r"'share': expected `float` <= 1\.0, not 2"),
        ({"share": "half"}, "share", "'share': expected `float`, not 'half'"),
        ({"share": True}, "share", "'share': expected `float`, not True"),
        ({"share": float("nan")}, "share", "must be a finite number, not nan"),
        ({"share": 1, "level": float("inf")}, "level", "must be a finite number, not inf"),
        ({"share": 1, "level": 3.5e38}, "level", r"'level': numbers must be within 3\.4e\+38 of 0, not 3\.5e\+38"),
        ({"share": 1, "count": 10**60}, "count", r"'count': numbers must be within 3\.4e\+38 of 0, not 1000"),
        (
            {"share": 1, "shares": 1},
            "shares",
            r"no parameter 'shares' \(did you mean 'share'\?\); it takes share, count",
        ),
        ({"share": 1, "count": 0}, "count", "'count': expected `int` >= 1"),
        ({"share": 1, "mode": "c"}, "mode", "'mode': expected one of a, b, not 'c'"),
        ({"share": 1, "count": 3}, "count", "'pair', count: at most 2 here"),
    ],
)
def test_parameter_faults_name_the_key(params, key, message):
    with pytest.raises(AlgorithmError, match=message) as caught:
        validate_params(PAIR, params, "ab")
    assert caught.value.key == key


def test_check_that_fails_is_a_fault_of_the_algorithm():
    def check(params, models):
        raise KeyError("odd")

    with pytest.raises(AlgorithmError, match=r"'odd', check\(\) failed: KeyError: 'odd'"):
        validate_params(Definition("odd", lambda _: Pair, Params, max_models=3, check=check), {"share": 1}, "ab")


@pytest.mark.parametrize(
    ("name", "params", "count", "message"),
    [
        ("entropy", {"threshold": 1}, 3, "takes exactly 2 models, the route has 3"),
        ("every_n", {"shape": "block", "n": 1}, 1, "takes at least 2 models, the route has 1"),
        ("every_n", {"shape": "visit", "n": 1}, 3, "shape: 'visit' takes exactly 2 models, the route has 3"),
        ("none", {}, 300, "takes at most 256 models"),
    ],
)
def test_number_of_models(name, params, count, message):
    with pytest.raises(AlgorithmError, match=message):
        validate_params(load(name), params, ["m"] * count)


def test_no_parameters_where_there_are_none():
    with pytest.raises(AlgorithmError, match="'none' has no parameter 'threshold'; it takes none"):
        validate_params(load("none"), {"threshold": 1}, "a")


@pytest.mark.parametrize(
    ("name", "value", "expected"), [("share", 0, 0.0), ("share", 0.5, 0.5), ("count", 2.0, 2.0), ("level", 2, 2.0)]
)
def test_overrides(name, value, expected):
    overrides = check_overrides(PAIR, {"share": 0.25, "count": 1}, "ab", {name: value})
    assert overrides == {name: expected}
    assert type(overrides[name]) is float


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("share", 1.5, "'share': expected `float` <= 1.0"),
        ("share", float("nan"), "finite"),
        ("level", 1e39, "within"),
        ("count", 1e39, "within"),
        ("share", "1", "expected `float`, not '1'"),
        ("share", None, "expected `float`, not None"),
        ("count", 2.5, "'count': expected `int`, not 2.5"),
        ("level", "auto", "'level': must be a number"),
        ("mode", 1, "'mode': is not a number; only the configuration file sets it"),
        ("loud", 1, "'loud': is not a number"),
        ("shar", 1, "did you mean 'share'"),
    ],
)
def test_override_faults(name, value, message):
    with pytest.raises(AlgorithmError, match=message) as caught:
        check_overrides(PAIR, {"share": 0.25, "count": 1}, "ab", {name: value})
    assert caught.value.key == name


class Tuples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: tuple[Annotated[float, Meta(ge=0)], ...]
    other: tuple[str, ...] = ()
    rest: float = 1.0


def _parts_fit(params, models):
    if sum(params.parts) + params.rest > 3:
        raise ValueError("parts: too much with the rest")


TUPLES = Definition("tuples", lambda _: Pair, Tuples, max_models=3, check=_parts_fit)


def test_tuples_of_numbers_are_parameters_of_rows():
    params = validate_params(TUPLES, {"parts": [1, 0.5], "other": ["x"]}, "ab")
    assert numeric_params(params) == {"parts.0": 1.0, "parts.1": 0.5, "rest": 1.0}
    configured = {"parts": [1, 0.5]}
    assert check_overrides(TUPLES, configured, "ab", {"parts": [0, 2]}) == {"parts.0": 0.0, "parts.1": 2.0}
    assert check_overrides(TUPLES, configured, "ab", {"rest": 0}) == {"rest": 0.0}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ({"parts": [1]}, "parts", "'parts': needs 2 numbers, as configured, not 1"),
        ({"parts": [1, -1]}, "parts", "'parts': expected `float` >= 0"),
        ({"parts": [1, "x"]}, "parts", "'parts': expected `float`"),
        ({"parts": 1}, "parts", "'parts': expected `array`"),
        ({"parts": [2, 1]}, "parts", "'tuples', parts: too much with the rest"),
        ({"rest": 2}, "parts", "'tuples', parts: too much with the rest"),
        ({"other": [1]}, "other", "'other': is not a number"),
    ],
)
def test_tuples_that_do_not_fit(overrides, key, message):
    with pytest.raises(AlgorithmError, match=message) as caught:
        check_overrides(TUPLES, {"parts": [1, 0.5]}, "ab", overrides)
    assert caught.value.key == key
