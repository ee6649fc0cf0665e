"""The command line that a shell script builds from assignments, arrays, defaults and simple tests, without running it.

`megatron.py` calls it. What a script leaves to its environment stays in the text, as `$NAME`.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
SEPARATORS = ("\n", ";", "&&", "||", "|", "&", ";;")
OPENING = {"if": "fi", "case": "esac", "while": "done", "for": "done", "until": "done", "select": "done"}
PREFIXES = ("export", "declare", "local", "readonly", "typeset")
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne},
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}  # fmt: skip
MAX_DEPTH = 20  # of expansions in expansions


@dataclass(frozen=True)
class Word:
    """A word of a script, as parts of text, each with whether quotes protect it from splitting and, if single, from expansion."""

    parts: tuple[tuple[str, str], ...]
    line: int

    @property
    def raw(self) -> str:
        """The text without quotes."""
        return "".join(text for text, _ in self.parts)


@dataclass
class Script:
    """The state of a script that is read."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Lines and texts of conditions that depend on the environment, and whose branches have options."""


def read_script(text: str) -> Script:
    """Returns the commands of a script, with variables expanded. Raises `ValueError` for one that cannot be read."""
    script = Script()
    _Reader(script, list(_tokens(text))).run()
    return script


def _tokens(text: str) -> Iterator[Word | str]:
    """Yields words and operators. The operator "(" follows the word of an array assignment directly."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    position, line = 0, 1
    parts: list[tuple[str, str]] = []

    def add(piece: str, quote: str) -> None:
        if parts and parts[-1][1] == quote == "":
            parts[-1] = (parts[-1][0] + piece, "")
        else:
            parts.append((piece, quote))

    while position < len(text):
        character = text[position]
        if character == "#" and not parts:
            position = _find(text, "\n", position)
            continue
        if character in " \t\n;&|()<>" and not (
            parts and text.startswith("(", position) and parts[-1][0].endswith("$")
        ):
            if parts:
                yield Word(tuple(parts), line)
                parts = []
            if character in "<>":
                yield character
            elif character not in " \t":
                double = text[position : position + 2]
                yield double if double in ("&&", "||", ";;") else character
                position += double in ("&&", "||", ";;")
                line += character == "\n"
            position += 1
        elif character == "\\":
            add(text[position + 1 : position + 2], "'")
            position += 2
        elif character in "'\"":
            end = _closing_quote(text, position)
            piece = text[position + 1 : end]
            parts.append((piece if character == "'" else re.sub(r'\\(["\\`])', r"\1", piece), character))
            line += piece.count("\n")
            position = end + 1
        elif character == "`" or (character == "$" and text[position + 1 : position + 2] in ("(", "{")):
            end = _end_of_expansion(text, position)
            add(text[position:end], "")
            position = end
        else:
            add(character, "")
            position += 1
    if parts:
        yield Word(tuple(parts), line)
    yield "\n"


def _find(text: str, part: str, start: int) -> int:
    found = text.find(part, start)
    return len(text) if found < 0 else found


def _closing_quote(text: str, start: int) -> int:
    quote, position = text[start], start + 1
    while position < len(text):
        if text[position] == quote:
            return position
        if quote == '"' and text[position] == "\\":
            position += 1
        elif quote == '"' and text[position] == "$" and text[position + 1 : position + 2] in ("(", "{"):
            position = _end_of_expansion(text, position) - 1
        position += 1
    raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: a quotation mark is not closed")


def _end_of_expansion(text: str, start: int) -> int:
    """Returns the end of $(...), ${...} or `...`."""
    if text[start] == "`":
        return _find(text, "`", start + 1) + 1
    opening, depth = text[start + 1], 0
    closing = ")" if opening == "(" else "}"
    for position in range(start + 1, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return position + 1
    raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: {opening} is not closed")


class _Reader:
    """Reads the statements of a script in order."""

    def __init__(self, script: Script, tokens: list[Word | str]) -> None:
        self.script, self.tokens, self.position = script, tokens, 0

    def run(self) -> None:
        while self.position < len(self.tokens):
            self._statement(executed=True)

    def _statement(self, *, executed: bool) -> None:
        """Reads up to the next separator."""
        words: list[Word | list[Word]] = []
        first: bool = True
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if isinstance(token, Word):
                if first and token.raw in OPENING:
                    self._block(token, executed=executed)
                    return
                if first and token.raw in ("{", "}", "then", "do", "!", "time", "exec"):
                    continue
                first = False
                words.append(token)
            elif token == "(":
                inner = self._parenthesis()
                last = words[-1] if words else None
                if isinstance(last, Word) and re.fullmatch(rf"{NAME}\+?=", last.raw):
                    words.append(inner)
            elif token in "<>":
                if self.position < len(self.tokens) and isinstance(self.tokens[self.position], Word):
                    self.position += 1
                if words and isinstance(words[-1], Word) and words[-1].raw.isdigit():
                    words.pop()  # a file descriptor
            elif token in SEPARATORS:
                holds = self._execute(words) if executed else None
                if token in ("&&", "||"):
                    self._statement(executed=executed and holds is (token == "&&"))
                return

    def _parenthesis(self) -> list[Word]:
        inner: list[Word] = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if token == ")":
                break
            if isinstance(token, Word):
                inner.append(token)
        return inner

    def _block(self, opening: Word, *, executed: bool) -> None:
        """Reads a conditional or a loop. Loops are not run."""
        if opening.raw != "if":
            depth = 1
            while depth and self.position < len(self.tokens):
                token = self.tokens[self.position]
                self.position += 1
                if isinstance(token, Word) and self._starts_statement(self.position - 1):
                    depth += (token.raw in OPENING) - (token.raw in ("fi", "esac", "done"))
            return
        taken: bool | None = False  # whether a branch was: None if that is unknown
        while True:
            start = self.position
            condition, holds = self._condition() if opening.raw != "else" else ([], True)
            line = opening.line
            run = executed and taken is False and holds is True
            unknown = executed and taken is not True and holds is None
            body_start = self.position
            closing = self._branch(executed=run)
            body = self.tokens[body_start : self.position]
            if (unknown or (executed and taken is None)) and any(
                isinstance(token, Word) and (token.raw.startswith("--") or ASSIGNMENT.match(token.raw))
                for token in body
            ):
                self.script.skipped.append((line, " ".join(word.raw for word in condition) or "else"))
            taken = None if unknown else taken if taken is not False else run
            if closing is None or closing.raw == "fi" or self.position == start:
                return
            opening = closing

    def _starts_statement(self, position: int) -> bool:
        before = self.tokens[position - 1] if position else "\n"
        return before in SEPARATORS or (isinstance(before, Word) and before.raw in ("then", "do", "else", "{"))

    def _condition(self) -> tuple[list[Word], bool | None]:
        """Reads to `then`. Returns the words, and whether the condition holds, if that can be known."""
        tokens: list[Word | str] = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if isinstance(token, Word) and token.raw == "then" and self._starts_statement(self.position - 1):
                break
            tokens.append(token)
        words = [token for token in tokens if isinstance(token, Word)]
        results: list[bool | None] = []
        operators: list[str] = []
        part: list[Word] = []
        for token in [*tokens, "end"]:
            if isinstance(token, Word):
                part.append(token)
            elif token in ("&&", "||", "end"):
                results.append(self.test(part))
                operators.append(token)
                part = []
        holds = results[0]
        for connective, result in zip(operators, results[1:], strict=False):
            pair = (holds, result)
            if connective == "&&":
                holds = False if False in pair else None if None in pair else True
            else:
                holds = True if True in pair else None if None in pair else False
        return words, holds

    def _branch(self, *, executed: bool) -> Word | None:
        """Reads a branch. Returns `elif`, `else` or `fi`, which ends it."""
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if isinstance(token, Word) and token.raw in ("elif", "else", "fi"):
                self.position += 1
                return token
            self._statement(executed=executed)
        return None

    def test(self, words: list[Word]) -> bool | None:
        """Returns whether `[ ... ]` holds; None if it depends on something outside of the script."""
        if not words or words[0].raw not in ("[", "[[", "test", "!"):
            return None
        if words[0].raw == "!":
            result = self.test(words[1:])
            return None if result is None else not result
        terms = [" ".join(self.expand(word)) for word in words[1:] if word.raw not in ("]", "]]")]
        if terms and terms[0] == "!":
            result = self.test([words[0], *words[2:]])
            return None if result is None else not result
        if any("$" in term or "`" in term for term in terms):
            return None
        if len(terms) == 2 and terms[0] in ("-z", "-n"):
            return (terms[1] == "") == (terms[0] == "-z")
        if len(terms) != 3 or terms[1] not in COMPARISONS:
            return None
        left, name, right = terms
        if name.startswith("-"):
            numbers = [int(term) for term in (left, right) if re.fullmatch(r"-?\d{1,18}", term)]
            return COMPARISONS[name](*numbers) if len(numbers) == 2 else None
        return COMPARISONS[name](left, right) if "*" not in right else None

    def _execute(self, words: list[Word | list[Word]]) -> bool | None:
        """Runs a simple command as far as it is understood: assigns variables, or keeps its words. Returns whether it succeeds."""
        rest = list(words)
        while rest and isinstance(rest[0], Word):
            word = rest[0]
            if word.raw in PREFIXES or (word.raw.startswith("-") and len(rest) < len(words)):
                rest.pop(0)
                continue
            match = ASSIGNMENT.match(word.raw)
            if not match or (word.parts[0][1] and "=" not in word.parts[0][0]):
                break
            name, append, _ = match.groups()
            rest.pop(0)
            if rest and isinstance(rest[0], list):
                values = [field for item in rest.pop(0) for field in self.expand(item)]  # type: ignore[union-attr]
                before = self.script.variables.get(name, []) if append else []
                self.script.variables[name] = [*([before] if isinstance(before, str) else before), *values]
            else:
                text, quote = word.parts[0]
                value = Word(((text.partition("=")[2], quote), *word.parts[1:]), word.line)
                joined = " ".join(self.expand(value, split=False))
                old = self.script.variables.get(name, "")
                self.script.variables[name] = (old if append and isinstance(old, str) else "") + joined
        command = [word for word in rest if isinstance(word, Word)]
        if not command:
            return True
        if command[0].raw in ("[", "[[", "test"):
            return self.test(command)
        self.script.commands.append([field for word in command for field in self.expand(word)])
        return True

    def expand(self, word: Word, *, split: bool = True, depth: int = 0) -> list[str]:
        """Returns the fields of a word."""
        fields: list[str] = [""]
        protected = False
        for text, quote in word.parts:
            protected |= quote != ""
            if quote == "'":
                fields[-1] += text
                continue
            for piece, is_value in self._pieces(text, depth):
                if isinstance(piece, list):
                    values = piece if quote else [part for item in piece for part in item.split()]
                elif is_value and split and not quote:
                    values = piece.split()
                    values = values if values or not piece else [""]
                else:
                    values = [piece]
                if values:
                    fields[-1] += values[0]
                    fields += values[1:]
        return fields if protected or fields != [""] else []

    def _pieces(self, text: str, depth: int) -> Iterator[tuple[str | list[str], bool]]:
        """Yields literal text, and the values of expansions, each with whether it is one."""
        if depth > MAX_DEPTH:
            raise ValueError("variables are nested too deep")
        position = 0
        while position < len(text):
            character = text[position]
            if character not in "$`":
                end = min(_find(text, "$", position), _find(text, "`", position))
                yield text[position:end], False
            elif character == "`" or text.startswith("$(", position) or text.startswith("${", position):
                end = _end_of_expansion(text, position)
                yield self._value(text[position:end], depth), True
            else:
                match = re.compile(rf"\$({NAME}|[0-9@*#?])").match(text, position)
                end = match.end() if match else position + 1
                yield (self._variable(match.group(1)) if match else "$"), match is not None
            position = end

    def _variable(self, name: str) -> str | list[str]:
        value = self.script.variables.get(name)
        if isinstance(value, list):
            return value[0] if value else ""
        return f"${name}" if value is None else value

    def _value(self, text: str, depth: int) -> str | list[str]:
        """Returns what $((...)), ${...} or $(...) stands for, or the text itself."""
        if text.startswith("$(("):
            return self._arithmetic(text, depth)
        match = re.fullmatch(rf"\$\{{({NAME}|\d)(\[(?:[@*]|\d+)\])?(?:(:?[-=+?])(.*))?\}}", text, re.DOTALL)
        if not match:
            return text
        name, subscript, default, other = match.groups()
        value = self.script.variables.get(name)
        if subscript:
            values = value if isinstance(value, list) else [value] if value is not None else []
            index = subscript[1:-1]
            return values if not index.isdigit() else values[int(index)] if int(index) < len(values) else ""
        if default and "?" not in default and (value is None or value == "") == ("+" not in default):
            replacement = Word(((other, '"'),), 0) if not other.startswith(('"', "'")) else next(_tokens(other))
            assert isinstance(replacement, Word)
            value = " ".join(self.expand(replacement, depth=depth + 1))
            if "=" in default:
                self.script.variables[name] = value
            return value
        if default and "+" in default:
            return ""
        return self._variable(name) if value is not None else text

    def _arithmetic(self, text: str, depth: int) -> str:
        expression = "".join(
            piece if isinstance(piece, str) else " ".join(piece) for piece, _ in self._pieces(text[3:-2], depth + 1)
        )
        expression = re.sub(NAME, lambda match: str(self._variable(match.group())).removeprefix("$"), expression)
        try:
            return str(_evaluate(ast.parse(expression.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return text


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**18:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not an expression of integers")


def commands_with(script: Script, pattern: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields, of each command with a word whose file name matches, the words before it and after it."""
    for command in script.commands:
        for words in (command, _nested(command)):
            found = [index for index, word in enumerate(words) if re.fullmatch(pattern, word.rpartition("/")[2])]
            if found:
                yield words[: found[0]], words[found[0] + 1 :]
                break


def _nested(command: list[str]) -> list[str]:
    """Returns the words of a command that another one gets as text, as `bash -c` does."""
    words = []
    for word in command:
        try:
            words += shlex.split(word) if " " in word.strip() else [word]
        except ValueError:
            words.append(word)
    return words
