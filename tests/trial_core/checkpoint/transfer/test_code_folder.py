"""Code folders become archives: what a version control would hold, and no credentials."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import commit_files
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import code_folder
from trial_core.checkpoint.transfer.code_archive import unpack_code
from trial_core.checkpoint.transfer.code_folder import PackedCode, check_code_folder, pack_code
from trial_core.checkpoint.transfer.trial_code import code_of_folder
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError

PEM = "-----BEGIN {}-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" * 2 + "\n-----END {}-----\n"


def write(folder: Path, **files: str) -> Path:
    return write_all(folder, {f"{name}.txt": text for name, text in files.items()})


def write_all(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def packed(folder: Path, *not_code: Path) -> list[str]:
    """The names in a folder's archive."""
    return sorted(unpacked(pack_code(folder, not_code).data))


def unpacked(data: bytes | None) -> dict[str, bytes]:
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {each.name: (archive.extractfile(each) or io.BytesIO()).read() for each in archive}


def left_out(result: PackedCode) -> list[str]:
    return [str(each) for each in result.left_out]


def git(folder: Path, *arguments: str) -> None:
    """Run git, without this user's settings."""
    settings = ("user.name=a", "user.email=a@b", "protocol.file.allow=always")
    options = [part for setting in settings for part in ("-c", setting)]
    subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True)


def checkout(folder: Path, tracked: dict[str, str], new: dict[str, str]) -> Path:
    """A git checkout with files that git tracks, and others."""
    write_all(folder, tracked)
    git(folder, "init")
    git(folder, "add", "--force", ".")
    return write_all(folder, new)


def experiment(folder: Path, **fields: Any) -> ExperimentConfig:
    searcher = {"metric": "loss", "max_length": {"batches": 1}}
    return ExperimentConfig.model_validate(
        {"entrypoint": "m:Trial", "searcher": searcher, "code": str(folder), **fields}
    )


def test_equal_code_gives_equal_bytes(tmp_path: Path) -> None:
    """Whatever the folder, the times and the order of writing."""
    files = {"model_def.py": "x = 1", "lib/a.py": "", "größe/b.json": "{}"}
    first = write_all(tmp_path / "a", files)
    second = write_all(tmp_path / "b", dict(reversed(files.items())))
    os.utime(second / "model_def.py", (1, 1))
    (first / "lib" / "a.py").chmod(0o600)
    assert pack_code(first) == pack_code(second)
    (second / "model_def.py").write_text("x = 2")
    assert pack_code(first) != pack_code(second)


def test_an_archive_can_be_unpacked(tmp_path: Path) -> None:
    """Contents and the right to execute are the same; packed again it gives the same bytes."""
    folder = write_all(tmp_path / "code", {"m.py": "1", "lib/run.sh": "#!", ".trialflowignore": ""})
    (folder / "lib" / "run.sh").chmod(0o755)
    data = pack_code(folder).data
    assert data is not None
    target = write_all(tmp_path / "target", {"of_an_earlier_run.py": ""})
    unpack_code(data, target)
    for path in (target, target / "lib" / "run.sh"):
        assert path.stat().st_mode & 0o777 == 0o755
    assert (target / "m.py").stat().st_mode & 0o777 == 0o644
    assert pack_code(target).data == data


def test_what_is_packed_without_git(tmp_path: Path) -> None:
    """Files of known kinds; no histories, caches, environments, hidden files, runs, checkpoints."""
    folder = write_all(
        tmp_path / "code",
        {
            "m.py": "", "Makefile": "", "lib/kernel.cu": "", "ds_config.json": "", ".env": "KEY=1",
            ".git/config": "", "__pycache__/m.pyc": "", ".cache/huggingface/token": "",
            "my env/pyvenv.cfg": "", "my env/lib/x.py": "", "conda/conda-meta/history": "",
            "trialflow-runs/toy/report.md": "", "storage/manifests/t.json": "",
            "lib/storage/code.py": "", "images/1.png": "", "images/2.png": "", "id_rsa": "",
            ".hidden.py": "",
        },
    )  # fmt: skip
    (folder / ".git" / "config").unlink()
    (folder / ".git").rmdir()
    result = pack_code(folder, [folder / "storage"])
    expected = ["Makefile", "ds_config.json", "lib/kernel.cu", "lib/storage/code.py", "m.py"]
    assert list(result.files) == expected
    why = "packed only if git tracks it"
    assert left_out(result) == [f"*.png (2 files; {why})", f"id_rsa ({why})"]


def test_what_is_packed_of_a_git_checkout(tmp_path: Path) -> None:
    """What git tracks, of any kind; new files of known kinds; what it ignores only if it is asked.

    A module that git ignores may be generated code: its absence is a warning.
    """
    folder = checkout(
        tmp_path / "code",
        {"m.py": "", "classes.csv": "", ".flake8": "", ".gitignore": "data/\n_*.py\n*.log\n"},
        {
            "forgotten.py": "", "run.log": "", "_version.py": "", "data/big.py": "", ".env": "",
            "new.csv": "", "__pycache__/m.py": "", "data/keep/a.bin": "",
        },
    )  # fmt: skip
    result = pack_code(folder)
    assert list(result.files) == [".flake8", ".gitignore", "classes.csv", "forgotten.py", "m.py"]
    assert left_out(result) == [
        "_version.py (git ignores it)",
        "data/ (git ignores it; has modules)",
        "new.csv (packed only if git tracks it)",
    ]
    write_all(folder, {".trialflowignore": "!_version.py\n!data/\nnew.csv\nm.py\n"})
    again = pack_code(folder)
    assert again.left_out == ()
    assert list(again.files) == [
        ".flake8", ".gitignore", ".trialflowignore", "_version.py", "classes.csv", "data/big.py",
        "data/keep/a.bin", "forgotten.py",
    ]  # fmt: skip


def test_a_code_folder_within_a_checkout(tmp_path: Path) -> None:
    """It has its own part; submodules and checkouts within it have theirs."""
    other = checkout(tmp_path / "other", {"lib.py": "", ".gitignore": "*.txt\n"}, {})
    git(other, "commit", "-m", "first")
    root = checkout(tmp_path / "root", {"above.py": "", "code/m.py": ""}, {"code/new.py": ""})
    git(root, "submodule", "add", str(other), "code/submodule")
    checkout(root / "code" / "clone", {"c.py": "", ".gitignore": "*.txt"}, {"notes.txt": ""})
    write_all(root / "code" / "submodule", {"new.py": "", "notes.txt": ""})
    names = packed(root / "code")
    assert [name for name in names if ".git" not in name] == [
        "clone/c.py", "m.py", "new.py", "submodule/lib.py", "submodule/new.py"
    ]  # fmt: skip


def test_another_repository_in_the_environment_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a hook of git, which sets GIT_DIR."""
    folder = checkout(tmp_path / "code", {"m.csv": ""}, {})
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert packed(folder) == ["m.csv"]


def test_a_checkout_that_ignores_the_code_folder_does_not_count(tmp_path: Path) -> None:
    """Such as one of the settings in a home folder."""
    checkout(tmp_path, {".gitignore": "*\n"}, {"code/m.py": "", "code/a.csv": ""})
    assert packed(tmp_path / "code") == ["m.py"]


@pytest.mark.parametrize("trouble", ["no git", "broken"])
def test_without_git_the_kinds_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Git is not installed, or refuses, as in another user's checkout: a warning says why."""
    folder = checkout(tmp_path / "code", {"m.py": "", "a.csv": ""}, {})
    if trouble == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (folder / ".git" / "HEAD").unlink()
    result = pack_code(folder)
    assert list(result.files) == ["m.py"]
    warning = next(result.warnings(folder))
    why = {"no git": r"No such file .* 'git'", "broken": "fatal: not a git repository"}[trouble]
    kinds = "so they are chosen by their kinds"
    assert re.fullmatch(f"git cannot list the files of {folder}, {kinds}: .*{why}.*", warning)


def test_a_file_named_as_credentials_is_never_packed(tmp_path: Path) -> None:
    """Neither if git tracks it, nor if a pattern takes it in, nor by a link."""
    names = [
        ".ENV", ".bash_history", ".cache/huggingface/token", ".docker/config.json", ".env",
        ".envrc", ".git-credentials", ".kube/config", ".netrc", ".npmrc", ".pgpass",
        ".prefect/trialflow-4200.password", ".ray/auth_token", "aws/credentials", "cert.p12",
        "id_ed25519.bak", "id_rsa", "join-token", "kaggle.json", "prod.env",
        "secrets.yaml", "service-account.json",
    ]  # fmt: skip
    folder = checkout(tmp_path / "code", {**dict.fromkeys(names, "x"), "m.py": ""}, {})
    for index, name in enumerate(names):
        (folder / f"link{index}.py").symlink_to(folder / name)
    patterns = [*names, "link*.py"]
    write_all(folder, {".trialflowignore": "".join(f"!{each}\n" for each in patterns)})
    result = pack_code(folder)
    assert list(result.files) == [".trialflowignore", "m.py"]
    lacking = [*names, *(f"link{index}.py" for index in range(len(names)))]
    why = "a name of files with credentials"
    assert sorted(left_out(result)) == [f"{each} ({why})" for each in sorted(lacking)]


def test_modules_and_templates_may_have_such_names(tmp_path: Path) -> None:
    """They handle credentials."""
    write_all(tmp_path, {"credentials.py": "", "secrets/__init__.py": "", ".env.example": ""})
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    assert packed(tmp_path) == [".env.example", "credentials.py", "secrets/__init__.py"]


KEYS = {
    "a private key": PEM.format("RSA PRIVATE KEY", "RSA PRIVATE KEY"),
    "a private key in JSON": json.dumps({"key": PEM.format("PRIVATE KEY", "PRIVATE KEY")}),
    "a key of AWS": "key = 'AKIA" + "Q3" * 8 + "'",
    "a key of AWS, its secret": "AWS_SECRET_ACCESS_KEY=" + "wJ/4" * 10,
    "a token of GitHub": "ghp_" + "x1" * 18,
    "a token of Hugging Face": "login('hf_" + "aB" * 17 + "')",
    "a key of OpenAI or Anthropic": "sk-proj-" + "x1_Z" * 10,
    "a private key, of Kubernetes": "client-key-data: " + "LS0t" * 10,
    "a key of Azure": "AccountName=a;AccountKey=" + "x1+/" * 20,
    "a key of Azure, for a container": "https://a/b?sv=1&sig=" + "x1%2" * 12,
    "a key of Google": "AIza" + "x1_-Z" * 7,
    "a token of GitLab": "glpat-" + "x1_-" * 5,
    "a token of Slack": "xoxb-" + "1234-" * 5,
    "a token of a package index or registry": "password = pypi-AgE" + "x1_-Z" * 10,
    "a token of a package index or registry, npm's": "//npm/:_authToken=" + "x1-_" * 6,
    "a token of a package index or registry, Docker's": '{"auths": {"hub": {"auth": "bWU6cA=="}}}',
    "a key of Prefect": "pnu_" + "x1" * 18,
    "a web token": ".".join(["eyJ" + "hbGciOiJIUzI1NiJ9"] * 2 + ["x1_-" * 5]),
    "the password of a server": "trialflow:" + "x-1_" * 8,
    "the password of a server, in .netrc": "machine a.b\n  login me\n  password hunter2",
    "the password of a server, in a URL": "http://me:hunter22@host/x",
    "a key of Weights & Biases": "wandb.login(key='" + "0123456789" * 4 + "')",
    "a key of Weights & Biases, for a shell": "WANDB_API_KEY=" + "0123456789" * 4,
    "a token": "0123456789abcdef" * 4 + "\n",
}
TEXT_KEYS = {
    "a key of AWS": "aws_secret_access_key = minioadmin",
    "a key": "export SOME_API_KEY=0123456789abcdef",
}


@pytest.mark.parametrize("what", KEYS)
def test_a_file_with_a_key_in_it_is_never_packed(what: str, tmp_path: Path) -> None:
    """Whatever its name; the warning does not show the key."""
    key = KEYS[what]
    content = key if what == "a token" else f"first line\n{key}\nlast line\n"
    write_all(tmp_path, {"m.py": "", "config.py": content, ".trialflowignore": "!config.py"})
    result = pack_code(tmp_path)
    assert list(result.files) == [".trialflowignore", "m.py"]
    assert left_out(result) == [f"config.py (holds {what.partition(' in ')[0].partition(',')[0]})"]


@pytest.mark.parametrize("what", TEXT_KEYS)
def test_a_value_of_a_key_is_not_packed(what: str, tmp_path: Path) -> None:
    """Of any form. A module computes it; a template leaves it open."""
    name = TEXT_KEYS[what].partition("=")[0]
    files = {"a.sh": f"{name}= $KEY", "b.ini": f"{name}=\nNEXT=01234567890abcdef"}
    write_all(tmp_path, {**files, "m.py": f"{name}= read_0123456789abcdef(1)"})
    write_all(tmp_path, {"run.sh": TEXT_KEYS[what]})
    result = pack_code(tmp_path)
    assert list(result.files) == ["a.sh", "b.ini", "m.py"]
    assert left_out(result) == [f"run.sh (holds {what})"]


def test_a_line_with_a_files_path_takes_it_in(tmp_path: Path) -> None:
    """Though its text looks like a token; not by a pattern, and no private key."""
    token, private = KEYS["a token of GitHub"], KEYS["a private key"]
    write_all(tmp_path, {"a.py": token, "lib/a.py": token, "lib/b.py": token, "key.py": private})
    write_all(tmp_path, {".trialflowignore": "!/a.py\n!lib/a.py\n!lib/b*\n!/key.py\n"})
    result = pack_code(tmp_path)
    assert list(result.files) == [".trialflowignore", "a.py", "lib/a.py"]
    held = ["key.py (holds a private key)", "lib/b.py (holds a token of GitHub)"]
    assert left_out(result) == held
    (warning,) = result.warnings(tmp_path)
    assert "a line !/PATH takes in the one file" in warning
    assert "!NAME" not in warning


def test_text_that_is_no_key(tmp_path: Path) -> None:
    """Code that handles keys, certificates, the examples of manuals, and digests are packed."""
    write_all(
        tmp_path,
        {
            "pem.py": "if '-----BEGIN RSA PRIVATE KEY-----' in text:\n    raise ValueError(text)\n",
            "ca.txt": PEM.format("CERTIFICATE", "CERTIFICATE"),
            "aws.md": "AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE",
            "names.py": "hf_tokenizer_config, sk_learn, token = 1, 2, 3",
            "sums.txt": "0" * 64 + "  data.csv\n",
            "data.sha256": "0" * 64 + "\n",
            ".trialflowignore": "!*.sha256",
            "netrc.py": 'f"machine {host} login {user} password {key}"',
            "tags.py": "TAG = 'task-" + "0a" * 20 + "'; NAME = 'xhf_" + "aB" * 17 + "'",
            "urls.md": "http://user:password@host, http://me:hunter22@localhost:1, http://a:${B}@c",
            "special_tokens.json": '{"pad_token": "<|endoftext|>", "sep_token": "</s>"}',
        },
    )
    assert left_out(pack_code(tmp_path)) == []


SECTIONS = {
    "checkpoint_storage": "checkpoint_storage: {url: s3://a/b, options: {secret: S3SECRET}}",
    "checkpoint_storage, as a URL": "checkpoint_storage: sftp://me:PASSWORD@host/runs",
    "checkpoint_storage, as a parameter": '{"config": {"checkpoint_storage": {"secret": "SECR"}}}',
    "environment_variables": "environment: {environment_variables: {DB_PASSWORD: DBSECRET}}",
    "environment_variables, as a list": "environment: {environment_variables: [DB_PASSWORD=SECR]}",
    "registry_auth": "environment: {registry_auth: {username: somebody, password: SECR}}",
}


@pytest.mark.parametrize("what", SECTIONS)
def test_an_experiment_with_credentials_is_not_packed(what: str, tmp_path: Path) -> None:
    """Its manifests do not show them either. One without them is packed."""
    plain = (
        "checkpoint_storage: {url: s3://a/b, options: {config_kwargs: {signature_version: s3v4}}}\n"
        "environment: {environment_variables: {TOKENIZERS_PARALLELISM: 'false'}}\n"
    )
    write_all(tmp_path, {"other.yaml": SECTIONS[what], "experiment.yaml": plain})
    result = pack_code(tmp_path)
    assert list(result.files) == ["experiment.yaml"]
    assert left_out(result) == [f"other.yaml (holds credentials in {what.partition(',')[0]})"]


def test_an_experiment_that_cannot_be_read_is_not_packed(tmp_path: Path) -> None:
    """If a line in such a section has a credential: of a template, one of several documents."""
    text = "checkpoint_storage:\n  options:\n  - {{secret: {}}}\nkey: other\n---\n{{%\n"
    write_all(tmp_path, {"m.py": "checkpoint_storage = {", "draft.yaml": text.format("S3SECRET")})
    write_all(tmp_path, {"plain.yaml": text.format("${SECRET}")})
    result = pack_code(tmp_path)
    assert list(result.files) == ["m.py", "plain.yaml"]
    assert left_out(result) == ["draft.yaml (holds credentials in checkpoint_storage)"]


def test_data_with_such_words_is_packed(tmp_path: Path) -> None:
    """Large data, data with tabs, and names that are no credentials'."""
    data = {"environment_variables": {"AUTHOR": "somebody", "PASSWORD": "{{ password }}"}}
    large = {"list": ["checkpoint_storage"] * 120_000, **data, "token": "endoftext"}
    write_all(
        tmp_path, {"large.json": json.dumps(large), "tabs.json": json.dumps(data, indent="\t")}
    )
    assert packed(tmp_path) == ["large.json", "tabs.json"]
    data["environment_variables"]["PASSWORD"] = "hunter22"
    write_all(tmp_path, {"tabs.json": json.dumps(data, indent="\t")})
    assert packed(tmp_path) == ["large.json"]


def test_a_file_with_a_credential_of_the_experiment_is_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its storage, of its variables, and the token of its nodes. The log says how much it is."""
    token = "a token of the user's that is long enough"
    write_all(
        tmp_path,
        {
            "m.py": "x = 1\n", "run.sh": "export DB_PASSWORD=hunter22", "s3.py": "key = 'pa55word'",
            "run-token.txt": token, "words.txt": "endoftext",
            "phrase.py": "'correct horse battery'",
        },
    )  # fmt: skip
    config = experiment(
        tmp_path,
        environment={
            "environment_variables": {
                "DB_PASSWORD": "hunter22",
                "KEY": "endoftext",
                "PASSPHRASE": "correct horse battery",
            }
        },
        resources={"engine": "join", "channel": {"token_file": str(tmp_path / "run-token.txt")}},
    )
    store = CheckpointStore("memory://c", {"secret": "pa55word"})
    with caplog.at_level(logging.INFO):
        archive = code_of_folder(config, store, logging.getLogger()).archive
    assert sorted(unpacked(archive)) == ["m.py", "words.txt"]
    assert f"checkpoints get the code of {tmp_path}: 2 files, 15 B (by their kinds)" in caplog.text
    for name in ("phrase.py", "run.sh", "s3.py"):
        assert f"{name} (holds a credential of this experiment)" in caplog.text
    assert not any(each in caplog.text for each in ("hunter22", "pa55word"))


def test_a_home_folder_is_no_code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a folder above it, nor the root of the file system. A folder in it is one.

    It is refused where code has to be sent; elsewhere a warning says that no code is packed.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "users" / "me"))
    code = write_all(tmp_path / "users" / "me" / "code", {"m.py": ""})
    (tmp_path / "link").symlink_to(code.parent)
    for folder in (code.parent, tmp_path / "link", tmp_path, Path("/")):
        with pytest.raises(ConfigError, match="move the trial or script and its experiment to"):
            check_code_folder(folder)
        result = pack_code(folder)
        assert (result.data, result.files) == (None, {})
        assert "with much besides code: checkpoints get no code of it" in next(
            result.warnings(folder)
        )
    assert packed(code) == ["m.py"]
    monkeypatch.setenv("HOME", "/")
    assert packed(code) == ["m.py"]


def test_a_user_may_have_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container. The root of the file system is no code folder for them either."""
    monkeypatch.setenv("HOME", "~")  # so expanduser answers for a user who is not in passwd
    monkeypatch.chdir(write_all(tmp_path / "code", {"m.py": ""}))
    assert packed(tmp_path / "code") == ["m.py"]
    with pytest.raises(ConfigError, match="with much besides code"):
        check_code_folder(Path("/"))


def test_a_home_folder_may_be_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers: only what git tracks is packed, and a warning says it."""
    new = {"new.py": "", "lib/x.py": "", ".bashrc": ""}
    folder = checkout(tmp_path / "app", {"m.py": ""}, new)
    monkeypatch.setenv("HOME", str(folder))
    check_code_folder(folder)
    result = pack_code(folder)
    assert list(result.files) == ["m.py"]
    assert left_out(result) == ["new.py (git does not track it)"]
    assert "checkpoints get only the files that git tracks" in next(result.warnings(folder))


def test_folders_that_git_ignores_are_searched_for_modules(tmp_path: Path) -> None:
    """The warning names those with code, which are neither environments nor caches."""
    new = {"gen/deep/a.py": "", "env/pyvenv.cfg": "", "env/a.py": "", "out/node_modules/a.py": ""}
    folder = checkout(tmp_path / "code", {".gitignore": "/*/\n", "m.py": ""}, new)
    assert left_out(pack_code(folder)) == ["gen/ (git ignores it; has modules)"]


def test_without_git_its_ignore_files_count(tmp_path: Path) -> None:
    """The deeper ones before the others."""
    files = {".gitignore": "*.txt\ndata/\n_*.py\n", "lib/.gitignore": "!keep.txt\n", "_a.py": ""}
    names = ["m.py", "a.txt", "data/x.yaml", "lib/a.txt", "lib/keep.txt", "lib/m.py"]
    write_all(tmp_path, {**files, **dict.fromkeys(names, "")})
    result = pack_code(tmp_path)
    assert list(result.files) == ["lib/keep.txt", "lib/m.py", "m.py"]
    assert left_out(result) == ["_a.py (git ignores it)"]


def test_dubious_ownership_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning says the command."""
    folder = checkout(tmp_path / "code", {"m.py": ""}, {})
    problem = f"fatal: detected dubious ownership in repository at '{folder}'"
    program = write_all(tmp_path, {"git": f'#!/bin/sh\necho "{problem}" >&2\nexit 128\n'}) / "git"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    warning = next(pack_code(folder).warnings(folder))
    assert f"git config --global --add safe.directory {folder}" in warning


def test_the_entrypoints_module_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why; nodes, which could not run it, are not waited for. A module that is
    installed, or a script that is elsewhere, is not missed."""
    write_all(tmp_path, {"m.py": KEYS["a token of GitHub"], "lib.py": ""})
    store, log = CheckpointStore("memory://c"), logging.getLogger()
    code_of_folder(experiment(tmp_path), store, log)
    why = r"lacks m\.py, .* m:Trial \(holds a token of GitHub\): in .*, a line !/PATH takes in"
    assert re.search(why, caplog.text)
    script = experiment(tmp_path, entrypoint="python ./m.py --a b")
    with pytest.raises(ConfigError, match=r"^entrypoint: .* lacks m\.py"):
        code_of_folder(script, store, log, must_send=True)
    for there in ("lib:Trial", "installed.lib:Trial", f"python {tmp_path}/m.py"):
        code_of_folder(experiment(tmp_path, entrypoint=there), store, log, must_send=True)


def test_modules_are_named_first(tmp_path: Path) -> None:
    """In one line, whatever the names are."""
    write_all(tmp_path, {f"{index:02}\nx.bin{index}": "" for index in range(11)})
    (tmp_path / "z.py").symlink_to(tmp_path / "gone")
    result = pack_code(tmp_path)
    (warning,) = result.warnings(tmp_path)
    assert "without z.py (a link" in warning
    assert "\n" not in warning + "".join(left_out(result))


def test_an_ignore_file_is_read_as_git_reads_one(tmp_path: Path) -> None:
    """It leaves out and takes in; .detignore counts if there is no other."""
    folder = write_all(
        tmp_path / "code",
        {"m.py": "", "data/a.csv": "", "data/keep.csv": "", "ca.pem": "", "lib/data/b.txt": ""},
    )
    (folder / ".detignore").write_text("/data/*\n!/data/keep.csv\n!*.pem\n")
    assert packed(folder) == [".detignore", "ca.pem", "data/keep.csv", "lib/data/b.txt", "m.py"]
    (folder / ".trialflowignore").write_text("*\n")
    assert pack_code(folder).data is None


def test_a_line_that_is_no_pattern(tmp_path: Path) -> None:
    """The error names the file and the line."""
    write_all(tmp_path, {".trialflowignore": "data/\n!\n"})
    with pytest.raises(ConfigError, match=r"\.trialflowignore, line 2: '!' is not a pattern"):
        pack_code(tmp_path)


def test_a_storage_in_the_code_folder_is_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the storage is the code folder itself, and if the runs' folder is in it."""
    archives = set()
    for index, place in enumerate(("{}", "file://{}", "{}/storage", "memory://{}")):
        folder = write_all(tmp_path / str(index), {"m.py": "", "my runs/toy/report.md": ""})
        monkeypatch.setenv("TRIALFLOW_HOME", str(folder / "my runs"))
        store = CheckpointStore(place.format(folder))
        commit_files(store)
        archive = code_of_folder(experiment(folder), store, logging.getLogger()).archive
        assert archive is not None
        archives.add(archive)
    assert len(archives) == 1


def test_large_files_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those over the limit of a file, and the largest of those that exceed the limit of all."""
    monkeypatch.setattr(code_folder, "MAX_FILE_BYTES", 2048)
    monkeypatch.setattr(code_folder, "MAX_TOTAL_BYTES", 5000)
    folder = write(tmp_path, a="x" * 1100, b="x" * 1200, c="x" * 1300, data="x" * 3072)
    result = pack_code(folder)
    assert list(result.files) == ["a.txt", "b.txt"]
    (warning,) = result.warnings(folder)
    assert "c.txt (1.3 KiB; all files may have 4.9 KiB together)" in warning
    assert "data.txt (3.0 KiB; a file may have 2.0 KiB)" in warning
    assert str(folder / ".trialflowignore") in warning


def test_the_archive_of_many_small_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a header in it."""
    monkeypatch.setattr(code_folder, "MAX_TOTAL_BYTES", 20_000)
    folder = write(tmp_path, **{f"f{index}": "" for index in range(50)})
    result = pack_code(folder)
    assert result.data is not None
    assert 10_000 < len(result.data) <= 20_480
    assert len(result.left_out) == 50 - 19


def test_a_folder_of_many_files_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds data. Its modules and the other folders are packed; the walk ends at ten times."""
    monkeypatch.setattr(code_folder, "MAX_FOLDER_FILES", 5)
    for index in range(4):
        write_all(tmp_path, {f"images/{index}/{each}.txt": "" for each in range(2)})
    write_all(tmp_path, {f"lib/{each}.py": "" for each in range(6)})
    write_all(tmp_path, {f"many/{each}.txt": "" for each in range(51)})
    write_all(tmp_path, {"images/load.py": ""})
    result = pack_code(tmp_path)
    assert list(result.files) == ["images/load.py", *(f"lib/{each}.py" for each in range(6))]
    limit = "8 files; a folder may have 5"
    assert left_out(result) == [f"images/**/*.txt ({limit})", "many/ (more than 50 files)"]


def test_the_code_folder_itself_may_be_one_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more files than a folder may have, those of the most common kind are left out."""
    monkeypatch.setattr(code_folder, "MAX_FOLDER_FILES", 5)
    write_all(tmp_path, {f"{each}.txt": "" for each in range(4)})
    write_all(tmp_path, {"m.py": "", "ds_config.json": "", "lib/a.txt": ""})
    result = pack_code(tmp_path)
    assert list(result.files) == ["ds_config.json", "lib/a.txt", "m.py"]
    limit = "there may be, besides those of folders, 5"
    assert left_out(result) == [f"*.txt (4 files; {limit})"]


@pytest.mark.parametrize("has_git", [False, True])
def test_links(tmp_path: Path, has_git: bool) -> None:
    """Those within the folder are followed; the others are named in a warning."""
    outside = write_all(tmp_path / "outside", {".env": "1", "more/x.py": ""})
    folder = write_all(tmp_path / "code", {"m.py": "", "lib/a.py": "", ".hidden": ""})
    write_all(folder, {".gitignore": ".hidden\n"} if has_git else {})
    (folder / "shared.py").symlink_to(outside / ".env")
    (folder / "dangling.py").symlink_to(tmp_path / "gone")
    (folder / "itself.py").symlink_to(folder / "itself.py")
    (folder / "again").symlink_to(folder / "lib")
    (folder / "lib" / "loop").symlink_to(folder)
    (folder / "elsewhere").symlink_to(outside / "more")
    (folder / "settings.py").symlink_to(folder / ".hidden")
    if has_git:
        git(folder, "init")
    result = pack_code(folder)
    assert list(result.files) == ["again/a.py", "lib/a.py", "m.py"]
    assert sorted(left_out(result)) == [
        f"dangling.py (a link to {tmp_path}/gone, which leads to no file)",
        f"elsewhere/ (a link to {outside}/more, outside the code folder)",
        f"itself.py (a link to {folder}/itself.py, which leads to no file)",
        "settings.py (a link to .hidden, which is left out)",
        f"shared.py (a link to {outside}/.env, outside the code folder)",
    ]


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    """A pipe would be read for ever."""
    os.mkfifo(tmp_path / "pipe.py")
    assert left_out(pack_code(tmp_path)) == ["pipe.py (not a file)"]


def test_a_file_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is packed, and the warning says why."""
    write(tmp_path, a="1", b="2")
    read = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    result = pack_code(tmp_path)
    assert unpacked(result.data) == {"a.txt": b"1"}
    assert left_out(result) == ["b.txt (cannot be read: Permission denied)"]


def test_a_folder_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is packed, and the warning says why."""
    write_all(tmp_path, {"a.py": "", "lib/b.py": ""})
    scan = os.scandir

    def refusing(path: str) -> Any:
        if path.endswith("/lib"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refusing)
        result = pack_code(tmp_path)
    assert list(result.files) == ["a.py"]
    assert left_out(result) == ["lib/ (cannot be read: Permission denied)"]


def test_a_folder_packed_again_is_read_again_only_if_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change counts though the file's size and time are as before."""
    write(tmp_path, a="one", b="two")
    first = pack_code(tmp_path)
    status = (tmp_path / "a.txt").stat()

    def fail(*_: Any) -> None:
        raise AssertionError("a file was read again")

    with monkeypatch.context() as patched:
        patched.setattr(code_folder, "credentials_in", fail)
        assert pack_code(tmp_path) == first
    (tmp_path / "a.txt").write_text("six")
    os.utime(tmp_path / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert unpacked(pack_code(tmp_path).data) == {"a.txt": b"six", "b.txt": b"two"}
    assert packed(tmp_path) == ["a.txt", "b.txt"]
    again = pack_code(tmp_path, secrets=["six six six six"])
    assert again.left_out == ()
    (tmp_path / "a.txt").write_text("six six six six")
    assert left_out(pack_code(tmp_path, secrets=["six six six six"])) == [
        "a.txt (holds a credential of this experiment)"
    ]


def test_a_file_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is the same when the disk answers again."""
    write(tmp_path, a="one")

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        assert left_out(pack_code(tmp_path)) == ["a.txt (cannot be read: Input/output error)"]
    assert packed(tmp_path) == ["a.txt"]
