import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.packing import canonical, unpack
from protocol.records import (
    CheckpointSpec,
    DataSpec,
    LossSpec,
    Manifest,
    ModelSpec,
    OptimiserSpec,
    SampleSpec,
    SlicingSpec,
    Training,
)
from protocol.signing import Identity
from swarm.config import (
    SETTING_COMMENTS,
    PeerSettings,
    is_import_path,
    is_listen_address,
    manifest_of,
    parse_settings,
    parse_training,
    read_settings,
    read_training,
    render_settings,
    settings_of,
)
from swarm.errors import ConfigError

RUN = """
[run]
name = "test"
steps = 10
microbatches_per_step = 4
microbatch_size = 2
"""
MODEL = '[model]\nfactory = "package.models:gpt"\n'
TEXT = '[data]\nsource = "text"\nfiles = ["*.py"]\nsequence_length = 16\n'
FACTORY = """
[data]
source = "factory"
factory = "package.data:digits"
[data.sample]
dtype = "float32"
shape = [1, 8, 8]
[data.target]
dtype = "int64"
high = 10
"""
WHOLE = RUN + MODEL + TEXT
PEER = Identity.from_seed(bytes(32)).peer


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_training(text)
    return caught.value


def test_the_smallest_manifest_takes_the_records_defaults():
    assert parse_training(WHOLE) == Training(
        name="test",
        steps=10,
        microbatches_per_step=4,
        microbatch_size=2,
        model=ModelSpec("package.models:gpt"),
        data=DataSpec("text", files=("*.py",), sequence_length=16),
    )


def test_every_table_maps_to_its_record():
    text = (
        RUN
        + "seed = 7\n"
        + MODEL
        + "[model.arguments]\nwidth = 64\nrates = [0.5, 1]\nbias = false\n"
        + FACTORY
        + '[loss]\nfunction = "package.loss:huber"\nweight = "samples"\n'
        + '[optimiser]\nname = "sgd"\nlearning_rate = 1\nmomentum = 0.5\nnesterov = true\n'
        + 'schedule = "cosine"\nwarmup_steps = 3\nfinal_fraction = 0.1\n'
        + '[execution]\ndeterminism = "exact"\nfraction_bits = 32\nrecompute = true\n'
        + "[slicing]\ncuts = [1, 4]\nmax_replicas = 2\n"
        + "[checkpoints]\nevery_steps = 5\nkeep = 3\n"
    )
    training = parse_training(text)
    assert training.seed == 7
    assert training.model.arguments == {"width": 64, "rates": [0.5, 1], "bias": False}
    assert training.data == DataSpec(
        "factory",
        factory="package.data:digits",
        sample=SampleSpec("float32", (1, 8, 8)),
        target=SampleSpec("int64", (), 10),
    )
    assert training.loss == LossSpec("package.loss:huber", "samples")
    assert training.optimiser == OptimiserSpec(
        name="sgd",
        learning_rate=1.0,
        momentum=0.5,
        nesterov=True,
        schedule="cosine",
        warmup_steps=3,
        final_fraction=0.1,
    )
    assert training.execution.fraction_bits == 32
    assert training.slicing == SlicingSpec((1, 4), 2)
    assert training.checkpoints == CheckpointSpec(5, 3)


def test_an_integer_where_a_number_is_expected_gives_the_same_run():
    whole, decimal = (
        parse_training(WHOLE + f"[optimiser]\nlearning_rate = {rate}\n") for rate in ("1", "1.0")
    )
    assert canonical(whole) == canonical(decimal)


def test_a_manifest_survives_its_encoding_and_the_nonce_changes_its_id():
    training = parse_training(RUN + MODEL + FACTORY)
    one = manifest_of(training, PEER, PEER, bytes(32))
    assert unpack(canonical(one), Manifest) == one
    assert manifest_of(training, PEER, PEER, b"1" * 32).run != one.run


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (
            WHOLE + "[optimiser]\nlearning_rat = 1.0\n",
            "unknown key `learning_rat` in [optimiser]",
            "did you mean `learning_rate`?",
        ),
        (WHOLE + "seeed = 1\n", "unknown key `seeed` in [data]", "remove it"),
        (
            RUN + "seeed = 1\n" + MODEL + TEXT,
            "unknown key `seeed` in [run]",
            "did you mean `seed`?",
        ),
        (WHOLE + "[optimizer]\n", "unknown key `optimizer` at the top", "`optimiser`?"),
        ("steps = 3\n" + WHOLE, "unknown key `steps` at the top level", "`steps` belongs in [run]"),
        (
            RUN + "sequence_length = 3\n" + MODEL + TEXT,
            "unknown key `sequence_length` in [run]",
            "belongs in [data]",
        ),
        (
            RUN + MODEL + FACTORY + "shap = [1]\n",
            "unknown key `shap` in [data.target]",
            "did you mean `shape`?",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_table_and_the_nearest(text, what, hint):
    error = refusal(text)
    assert what in error.what
    assert hint in error.hint
    assert error.evidence[0].startswith("keys ")


@pytest.mark.parametrize(
    ("text", "what", "expected"),
    [
        (WHOLE.replace("steps = 10\n", ""), "run.steps is missing", "an integer from 1"),
        (RUN + TEXT, "model is missing", "a table"),
        (RUN + "[model]\n" + TEXT, "model.factory is missing", "a text of 1 to 200"),
        (WHOLE.replace("= 10", '= "10"'), 'run.steps = "10" cannot be used', "an integer from 1"),
        (WHOLE.replace("= 10", "= 0"), "run.steps = 0 cannot", "an integer from 1"),
        (WHOLE.replace("= 10", "= true"), "run.steps = true cannot", "an integer"),
        (WHOLE.replace("= 10", "= 2.0"), "run.steps = 2.0 cannot", "an integer"),
        (WHOLE.replace('["*.py"]', '"*.py"'), 'data.files = "*.py"', "a list, each item a text"),
        (WHOLE.replace('["*.py"]', "[1]"), "data.files = [1]", "a list, each item a text"),
        (WHOLE.replace('"text"', '"txt"'), 'data.source = "txt"', '"factory", "text", "tokens"'),
        (WHOLE + "[optimiser]\nbetas = [0.9]\n", "optimiser.betas = [0.9]", "a list of 2, each"),
        (WHOLE + "[optimiser]\neps = 0\n", "optimiser.eps = 0", "a number above 0"),
        (WHOLE + "[optimiser]\neps = nan\n", "optimiser.eps = nan", "a number above 0"),
        (WHOLE + "[optimiser]\neps = inf\n", "optimiser.eps = inf", "a finite number"),
        (WHOLE + "[execution]\nrecompute = 1\n", "execution.recompute = 1", "true or false"),
        (WHOLE + "[slicing]\nmax_replicas = -1\n", "slicing.max_replicas = -1", "an integer"),
        (WHOLE + "[checkpoints]\nevery_steps = 2.0\n", "every_steps = 2.0", "an integer"),
        (
            WHOLE + "[checkpoints]\nevery_steps = 2\nkeep = 0\n",
            "checkpoints.keep = 0",
            "an integer from 1",
        ),
        (
            WHOLE.replace(TEXT, "[model.arguments]\nwhen = 2020-01-01\n" + TEXT),
            "model.arguments.when = 2020-01-01",
            "true or false or an integer",
        ),
        (
            WHOLE.replace(TEXT, "[model.arguments]\nx = [1, 9223372036854775808]\n" + TEXT),
            "model.arguments.x = 9223372036854775808",
            "64 bits",
        ),
        ("run = 3\n" + MODEL + TEXT, "run = 3 cannot be used", "a table, [run]"),
        (RUN + MODEL + FACTORY.replace("[data.target]", "[x]"), "unknown key `x`", "keys"),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_the_expectation(text, what, expected):
    error = refusal(text)
    assert what in error.what
    assert expected in error.evidence[0]


def test_a_misspelt_choice_gets_a_suggestion():
    assert "adamw" in refusal(WHOLE + '[optimiser]\nname = "adamww"\n').hint


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        (WHOLE.replace('"package.models:gpt"', '"gpt"'), "model.factory", "import path"),
        (WHOLE.replace("files", "# "), "data.files is missing", "at least one file"),
        (WHOLE.replace("sequence_length", "# "), "data.sequence_length", "at least 1 token"),
        (WHOLE + "vocabulary = 100\n", "data.vocabulary = 100", "at least 256"),
        (
            WHOLE.replace('"text"', '"tokens"').replace('["*.py"]', '["a", "b"]'),
            'data.files = ["a", "b"]',
            "exactly one file",
        ),
        (WHOLE.replace('"text"', '"tokens"') + "vocabulary = 0\n", "data.vocabulary", "at least 1"),
        (
            RUN + MODEL + FACTORY.replace('factory = "package.data:digits"', ""),
            "data.factory is missing",
            "import path",
        ),
        (
            RUN + MODEL + FACTORY.split("[data.sample]")[0],
            "data.sample is missing",
            "a table with dtype and shape",
        ),
        (
            RUN + MODEL + FACTORY.split("[data.target]")[0],
            "data.target is missing",
            "a table with dtype and shape",
        ),
        (RUN + MODEL + FACTORY.replace("high = 10", ""), "data.target.high", "at least 1"),
        (
            RUN + MODEL + FACTORY.replace("shape =", "high = 3\nshape ="),
            "data.sample.high = 3",
            "only int64",
        ),
        (WHOLE + '[loss]\nfunction = "hinge"\n', 'loss.function = "hinge"', '"cross_entropy"'),
        (WHOLE + '[loss]\nfunction = "mse"\n', 'loss.function = "mse"', "integer targets"),
        (
            WHOLE + '[optimiser]\nname = "sgd"\nmomentum = 0.0\nnesterov = true\n',
            "optimiser.momentum = 0.0",
            "more than 0",
        ),
        (WHOLE + "[optimiser]\nbetas = [0.9, 1.0]\n", "optimiser.betas", "below 1"),
        (WHOLE + "[optimiser]\nwarmup_steps = 11\n", "optimiser.warmup_steps = 11", "= 10"),
        (WHOLE + "[slicing]\ncuts = [2, 2]\n", "slicing.cuts = [2, 2]", "strictly increasing"),
        (
            WHOLE + "[checkpoints]\nevery_steps = 11\n",
            "checkpoints.every_steps = 11",
            "at most run.steps = 10",
        ),
        (
            WHOLE.replace("per_step = 4", "per_step = 65536")
            + '[execution]\ndeterminism = "exact"\nfraction_bits = 47\n',
            "execution.fraction_bits = 47",
            "at most 46",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(text, path, expected):
    error = refusal(text)
    assert path in error.what
    assert expected in error.evidence[0]


@pytest.mark.parametrize(
    ("text", "useless"),
    [
        (WHOLE + 'dtype = "uint8"\n', "data.dtype"),
        (RUN + MODEL + FACTORY.replace("factory =", "vocabulary = 9\nfactory ="), "data.vocab"),
        (WHOLE + "[optimiser]\nmomentum = 0.5\n", "optimiser.momentum"),
        (WHOLE + '[optimiser]\nname = "sgd"\neps = 1e-6\n', "optimiser.eps"),
        (WHOLE + "[optimiser]\nfinal_fraction = 0.5\n", "optimiser.final_fraction"),
        (WHOLE + "[execution]\nfraction_bits = 30\n", "execution.fraction_bits"),
        (WHOLE + "[checkpoints]\nkeep = 3\n", "checkpoints.keep"),
        (WHOLE + "[checkpoints]\nevery_steps = 0\nkeep = 3\n", "checkpoints.keep"),
    ],
)
def test_a_key_without_effect_is_refused(text, useless):
    error = refusal(text)
    assert f"{useless}" in error.what
    assert "has no effect" in error.what


def test_what_makes_a_key_useless_is_shown_as_it_is_written():
    assert refusal(WHOLE + "[checkpoints]\nkeep = 3\n").evidence == (
        "checkpoints.every_steps is 0",
    )
    assert refusal(WHOLE + "[optimiser]\nmomentum = 0.5\n").evidence == (
        'optimiser.name is "adamw"',
    )


@pytest.mark.parametrize(
    "text",
    [
        "[slicing]\nmax_replicas = 0\n",
        "[slicing]\nmax_replicas = 1\n",  # as many as there may ever be, with nothing cut
        "[checkpoints]\nevery_steps = 10\n",
        "[checkpoints]\nevery_steps = 1\nkeep = 1\n",
        "[checkpoints]\n",
    ],
)
def test_limits_and_checkpoints_that_can_be(text):
    assert isinstance(parse_training(WHOLE + text), Training)


def test_a_syntax_error_shows_its_line():
    error = refusal("[run]\nname = 'a'\nsteps = = 3\n")
    assert "line 3" in error.what
    assert error.evidence == ("line 3: steps = = 3",)


@pytest.mark.parametrize("text", ["[run", "x = " + "[" * 5000, 'x = "', "[run]\n[run]\n"])
def test_whatever_is_not_toml_is_a_config_error(text):
    assert "RUN.toml" in refusal(text).what


@given(st.text())
def test_no_text_raises_anything_else(text):
    try:
        parse_training(text)
    except ConfigError as error:
        assert error.exit_code == 3


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_training(tmp_path / "RUN.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_training(binary)


def test_a_file_is_named_in_the_errors_about_it(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(WHOLE, encoding="utf-8")
    assert read_training(path).name == "test"
    path.write_text("x = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match="mine.toml: unknown key `x`"):
        read_training(path)


def test_the_manual_lists_every_key_and_its_example_is_valid():
    manual = (Path(__file__).parents[1] / "docs" / "manifest.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", manual, re.DOTALL)
    assert example is not None
    training = parse_training(example[1])
    tables = (training.slicing, training.checkpoints)
    for record in (training, training.data, training.optimiser, training.execution, *tables):
        for key in record.__struct_fields__:
            assert re.search(rf"`\[?({key}|data\.{key})\]?`|\[{key}\]", manual), key


# --- a peer's own settings ---------------------------------------------------------------


def test_an_empty_file_gives_the_defaults():
    assert parse_settings("") == PeerSettings()


@given(
    st.builds(
        PeerSettings,
        listen=st.sampled_from(["127.0.0.1:0", "[::1]:31337", "host.example:65535"]),
        device=st.sampled_from(["cpu", "cuda:0", "cuda:12"]),
        host_label=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        data_dir=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        threads=st.integers(0, 256),
        wait_for_peers=st.integers(1, 100),
        stages=st.integers(0, 100),
        allowed_peers=st.lists(st.just(PEER), max_size=2).map(tuple),
    )
)
def test_rendered_settings_parse_to_themselves(settings):
    assert parse_settings(render_settings(settings)) == settings


def test_every_setting_is_commented_where_it_is_rendered():
    text = render_settings(PeerSettings())
    for field in fields(PeerSettings):
        comment = SETTING_COMMENTS[field.name].splitlines()[-1]
        assert f"# {comment}\n{field.name} = " in text


@pytest.mark.parametrize(
    ("text", "what", "words"),
    [
        ('liste = "x"', "unknown key `liste` at the top level", "did you mean `listen`?"),
        ('listen = "nowhere"', 'listen = "nowhere"', "HOST:PORT"),
        ('listen = "h:65536"', 'listen = "h:65536"', "0 to 65535"),
        ('device = "gpu"', 'device = "gpu"', "cuda"),
        ("threads = -1", "threads = -1", "from 0 to 256"),
        ("wait_for_peers = 0", "wait_for_peers = 0", "from 1"),
        ('allowed_peers = ["bob"]', 'allowed_peers = "bob"', "peer ids"),
        ('allowed_peers = "bob"', 'allowed_peers = "bob"', "a list"),
    ],
)
def test_wrong_settings_are_refused(text, what, words):
    with pytest.raises(ConfigError) as caught:
        parse_settings(text)
    assert what in caught.value.what
    assert words in str(caught.value)


def test_settings_from_elsewhere_are_checked_in_the_same_way(tmp_path: Path):
    with pytest.raises(ConfigError, match="command line: device"):
        settings_of({"device": "abacus"}, "command line")
    path = tmp_path / "peer.toml"
    path.write_text("threads = 2\n", encoding="utf-8")
    assert read_settings(path).threads == 2


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("127.0.0.1:0", True),
        ("[::]:1", True),
        ("::1:80", False),
        ("host", False),
        (":80", False),
        ("a b:80", False),
        ("host:", False),
        ("host:١", False),
    ],
)
def test_listen_addresses(text, valid):
    assert is_listen_address(text) is valid


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("a:b", True),
        ("a.b:c.d", True),
        ("a", False),
        (":b", False),
        ("a:", False),
        ("a:b:c", False),
        ("a..b:c", False),
        ("a b:c", False),
    ],
)
def test_import_paths(text, valid):
    assert is_import_path(text) is valid
