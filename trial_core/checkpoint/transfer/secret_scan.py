"""Finds files that hold credentials, by their names and by their content."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import pathspec

from trial_core.checkpoint.storage.credentials import secrets_in
from trial_core.config.yaml_file import parse_yaml
from trial_core.errors import ConfigError

_NAMES = pathspec.GitIgnoreSpec.from_lines(
    [
        ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass",
        ".git-credentials", ".boto", ".s3cfg", ".htpasswd", ".dockercfg", ".*_history",
        ".aws/", ".azure/", ".config/gcloud/", ".docker/", ".gnupg/", ".huggingface/", ".kube/",
        ".prefect/", ".ray/", ".ssh/", ".cache/", "secrets/",
        "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.password",
        "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", "join-token", "auth_token",
        "rclone.conf",
        "credentials", "credentials.*", "*_credentials.*", "secret.*", "secrets.*", "kaggle.json",
        "client_secret*", "service-account*", "service_account*", "msal_token_cache*", "*.tfstate",
        # Templates, and modules, which only handle credentials.
        "!*.example", "!*.sample", "!*.template", "!*.py", "!*.pyi",
    ]
)  # fmt: skip
"""Names that files with credentials usually have, in lower case."""

_BACKUP = re.compile(r"(?:\.(?:backup|bak|copy|old|orig|save)|~)+$")

PRIVATE_KEY = "a private key"
OWN = "a credential of this experiment"

_BASE64 = rb"[A-Za-z0-9+/]"
_ASSIGNED = rb"[\"']?[ \t]{0,3}[=:][ \t]{0,3}[\"']?"
_KEYS: Mapping[str, tuple[bytes, ...]] = {
    PRIVATE_KEY: (
        rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:\\[rn]|[\s\"',])*"
        rb"(?:[A-Za-z-]+: [^\n]*\n\s*)*" + _BASE64 + rb"{32}",
        rb"client-key-data:\s*" + _BASE64 + rb"{40}",
    ),
    "a key of AWS": (
        rb"A(?:KIA|SIA)(?![A-Z0-9]*EXAMPLE)[A-Z0-9]{16}(?![A-Za-z0-9])",
        rb"(?i:secret_?access_?key)\W{1,6}(?!\S*EXAMPLE)" + _BASE64 + rb"{40}",
    ),
    "a key of Azure": (rb"AccountKey=" + _BASE64 + rb"{40}", rb"[?&]sig=[A-Za-z0-9%+/]{40}"),
    "a key of Google": (
        rb"AIza[A-Za-z0-9_-]{35}", rb"GOCSPX-[A-Za-z0-9_-]{28}", rb"ya29\.[A-Za-z0-9_-]{30}",
    ),
    "a token of GitHub": (rb"gh[pousr]_[A-Za-z0-9]{36}", rb"github_pat_[A-Za-z0-9_]{40}"),
    "a token of GitLab": (rb"glpat-[A-Za-z0-9_-]{20}",),
    "a token of Hugging Face": (rb"hf_[A-Za-z0-9]{34}",),
    "a key of OpenAI or Anthropic": (
        rb"sk-(?:proj|svcacct|admin|ant)-[A-Za-z0-9_-]{24}", rb"sk-[A-Za-z0-9]{40}",
    ),
    "a token of Slack": (rb"xox[abeoprs]-[A-Za-z0-9-]{20}",),
    "a token of a package index or registry": (
        rb"pypi-AgE[A-Za-z0-9_-]{50}", rb"npm_[A-Za-z0-9]{36}", rb"_authToken=[A-Za-z0-9_-]{20}",
        rb"dckr_pat_[A-Za-z0-9_-]{20}", rb'"auths"\s*:\s*{\s*"[^"]*"\s*:\s*{\s*"auth"',
    ),
    "a key of Prefect": (rb"pn[bu]_[A-Za-z0-9]{36}",),
    "the password of a server": (
        rb"trialflow:[A-Za-z0-9_-]{32}(?![\w-])",
        rb"machine\s+\S+\s+login\s+\S+\s+password\s+(\S+)",
        rb"://[^\s/:@\"'<>{}$]*:([^\s/:@\"'<>{}$]{4,})@(?!localhost|127\.|example\.)[\w\[]",
    ),
    "a web token": (rb"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20}",),
    "a key of Weights & Biases": (
        rb"(?:WANDB|wandb)[^\n]{0,20}?(?i:key|login)[^\n]{0,20}?[\"'=:\s]([0-9a-f]{40})(?![0-9a-f])",
    ),
    "a token": (rb"\A\s*[0-9a-fA-F]{64}\s*\Z",),  # nothing else: see `trialflow join`
}  # fmt: skip
"""Patterns of keys with a known form. A match must not be in a longer word, or its group 1,
if it has one, must not be a placeholder. Each begins with fixed text where it can: fast."""
_KEYS_OF_TEXT: Mapping[str, tuple[bytes, ...]] = {
    "a key of AWS": (rb"[Ss][Ee][Cc][Rr][Ee][Tt]_?(?i:access_?key)" + _ASSIGNED + rb"(\S{8,})",),
    "a key": (
        rb"[Aa][Pp][Ii]_?[Kk][Ee][Yy]" + _ASSIGNED + rb"(?=[\w+/.-]*\d)([\w+/.-]{16,})",
    ),
}  # fmt: skip
"""The same, in files other than modules: in a module a value may be an expression."""


def _compiled(keys: Mapping[str, tuple[bytes, ...]]) -> list[tuple[str, re.Pattern[bytes]]]:
    return [(what, re.compile(each)) for what, patterns in keys.items() for each in patterns]


_PATTERNS, _PATTERNS_OF_TEXT = _compiled(_KEYS), _compiled({**_KEYS, **_KEYS_OF_TEXT})
_IN_WORD = re.compile(rb"(?<!\\)[A-Za-z0-9]\Z")
_PLACEHOLDER = re.compile(
    rb"[{$<%*]|your|(?:my)?_?(?:passw(?:or)?d|pass|pwd?|secret|token|(?:api_?)?key)\W*$"
    rb"|.*(?:example|placeholder|change_?me|\.\.\.|xxxx)", re.IGNORECASE,
)  # fmt: skip
_REFERENCE = re.compile(r"[{$<%*]")  # to a value that is elsewhere
_MODULES = (".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".rs")
_DIGEST_NAME = re.compile("sha|digest|checksum|hash")

_EXPERIMENT_KINDS = (".yaml", ".yml", ".json")
_SECTIONS = ("checkpoint_storage", "environment_variables", "registry_auth")
_SECTION_KEY = re.compile(
    rf"""(?:^[ \t-]*|[{{,]\s*)["']?({"|".join(_SECTIONS)})["']?[ \t]*:""", re.MULTILINE
)
_PAIR = re.compile(r"""([\w.-]+)["']?[ \t]*[:=][ \t]*["']?([^\s"',\[\]{}][^\s"',\]}]*)""")
_MAX_PARSED = 2**16  # larger YAML takes long to parse
_MAX_LINES = 1000  # of a section, in text that is not parsed


def is_named_as_credentials(path: str) -> bool:
    """Return whether a file's or its folder's name usually means credentials. Copies that editors
    and people keep (``.bak``) count as their originals."""
    return _NAMES.match_file(_BACKUP.sub("", path.lower()))


def searchable(secrets: Iterable[str]) -> list[bytes]:
    """The secrets to search for in files, without possible common words and files' names."""
    return [
        each.encode()
        for each in secrets
        if (len(each) >= 12 or re.match(r"(?s)(?=.*\d)(?=.*[A-Za-z]).{8}", each))
        and not os.path.exists(each)
    ]


def credentials_in(name: str, content: bytes, secrets: Collection[bytes]) -> str | None:
    """The kind of credentials in a file, to follow "holds"; None if none is seen. `secrets`: the
    experiment's, as from `searchable`."""
    if any(each in content for each in secrets):
        return OWN
    name = name.lower()
    for what, pattern in _PATTERNS if name.endswith(_MODULES) else _PATTERNS_OF_TEXT:
        if what == "a token" and _DIGEST_NAME.search(name):
            continue
        if any(map(_is_credential, pattern.finditer(content))):
            return what
    return _experiment_credentials(content) if name.endswith(_EXPERIMENT_KINDS) else None


def _is_credential(match: re.Match[bytes]) -> bool:
    """Return whether it is neither in a longer word (the "sk-" of "task-") nor a placeholder."""
    if match.re.groups:
        return not _PLACEHOLDER.match(match[1])
    before = match.string[max(0, match.start() - 2) : match.start()]
    return not (match[0][:1].isalnum() and _IN_WORD.search(before))


def _experiment_credentials(content: bytes) -> str | None:
    """The credentials of an experiment, which may be a parameter among others."""
    text = content.decode(errors="replace")
    if not _SECTION_KEY.search(text):
        return None
    try:
        sections = list(_sections(_parsed(text)))
    except (ConfigError, RecursionError):  # a template, several documents, a large file
        sections = list(_sections_of_lines(text))
    for name, section in sections:
        secrets = secrets_in("", {name: section})
        if not all(map(_REFERENCE.match, secrets)):
            return f"credentials in {name}"
    return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if len(text) > _MAX_PARSED:
            raise ConfigError("too large to parse it") from None
        return parse_yaml(text, "")


def _sections_of_lines(text: str) -> Iterator[tuple[str, Any]]:
    """As `_sections`, of text that is not valid: the pairs in the lines of a section."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        depth = len(line) - len(line.lstrip(" \t-")) + 1
        for match in _SECTION_KEY.finditer(line):
            below = lines[number : number + _MAX_LINES]
            inner = takewhile(lambda each: not each[:depth].strip(" \t-"), below)  # noqa: B023
            for name, value in _PAIR.findall("\n".join([line[match.start(1) :], *inner])):
                yield match[1], {name: value}


def _sections(value: Any) -> Iterator[tuple[str, Any]]:
    """The sections of experiments that may have credentials, at any depth."""
    if isinstance(value, Mapping):
        yield from ((name, _assigned(value[name])) for name in _SECTIONS if name in value)
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, Iterable) and not isinstance(parts, str):
        for each in parts:
            yield from _sections(each)


def _assigned(value: Any) -> Any:
    """The same with each text NAME=VALUE, as in lists of environment variables, as a mapping."""
    if isinstance(value, Mapping):
        return {name: _assigned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_assigned(each) for each in value]
    if isinstance(value, str) and re.match(r"\w+=", value):
        return dict([value.split("=", 1)])
    return value
