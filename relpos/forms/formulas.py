"""The formula of an encoding, a line of plain text, as MathML, which browsers show without scripts.

A formula has statements, separated by a comma and two spaces, and may end with a note after a semicolon and two spaces:
"B_ij = −m_h·|i − j|,  m_h = 2^(−8h/H);  a note". Subscripts are letters and digits after _, or any text in braces;
exponents after ^ are a symbol, or any text in parentheses.
"""

import html
import re

TOKEN = re.compile(r"\s+|\d+(?:\.\d+)?|\.\.|[^\W\d_]+\d*|.", flags=re.DOTALL)
SYMBOL = re.compile(r"([^\W\d_])(\d+)")  # r1: r with the index 1
OPENING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "|": "|"}
SUMS = "Σ∏"
UPRIGHT = {"inf": "∞"}


def statements(formula: str) -> tuple[list[str], str]:
    """The statements of a formula, and the note after them.

    Example:
        >>> statements("B_ij = −m_h·|i − j|,  m_h = 2^(−8h/H)")
        (['B_ij = −m_h·|i − j|', 'm_h = 2^(−8h/H)'], '')
    """
    mathematics, _, note = formula.partition(";  ")
    return [part.strip() for part in mathematics.split(",  ")], note.strip()


def mathml(statement: str) -> str:
    """One statement as HTML with MathML in it; every character is escaped.

    Browsers do not wrap a formula: what a space separates outside of brackets is one each, so that lines can end there.
    """
    parts = _pieces(statement)
    return "<span>" + " ".join(f"<math>{_Parser(part).row(None)}</math>" for part in parts) + "</span>"


def _pieces(statement: str) -> list[str]:
    """A statement, split at the spaces outside of brackets."""
    pieces, depth, bars = [""], 0, False
    for sign in statement:
        depth += (sign in "([{⌊") - (sign in ")]}⌋")
        bars ^= sign == "|"
        if sign == " " and depth == 0 and not bars:
            pieces.append("")
        else:
            pieces[-1] += sign
    return [piece for piece in pieces if piece]


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = TOKEN.findall(text)
        self.place = 0

    def _next(self) -> str:
        token = self.tokens[self.place] if self.place < len(self.tokens) else ""
        self.place += 1
        return token

    def _peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def row(self, end: str | None) -> str:
        """What stands before a closing bracket, which is read, or before the end of the text."""
        parts: list[str] = []
        last = ""  # the token before: a space is kept between symbols, not beside operators
        while (token := self._peek()) and token != end:
            if token.isspace():
                self._next()
                following = self._peek()
                symbols = last.isalnum() and (following.isalnum() or following in SUMS or following in OPENING)
                if symbols or (last in (",", "'") and following.isalpha() and len(following) > 1):
                    parts.append('<mspace width="0.35em"/>')
                continue
            alone = self.tokens == [token]  # between two spaces, which set it apart
            if not token.isalnum() and (alone or (token == "−" and not (last.isalnum() or last in OPENING))):
                self._next()
                parts.append(f'<mo form="prefix" lspace="0" rspace="0">{_escaped(token)}</mo>')
            else:
                parts.append(self._scripted())
            last = token
        if self._peek() == end:
            self._next()
        return "<mrow>" + "".join(parts) + "</mrow>"

    def _scripted(self) -> str:
        """An atom with its subscript and its exponent."""
        sum_sign = self._peek() in SUMS
        base, low, high = self._atom(), "", ""
        while self._peek() in ("_", "^", "²"):
            sign = self._next()
            if sign == "²":
                high = "<mn>2</mn>"
            elif sign == "^":
                high = self._script("(", ")")
            elif sum_sign:
                low, high = self._limits()
            else:
                low = self._script("{", "}")
        names = ("munder", "mover", "munderover") if sum_sign else ("msub", "msup", "msubsup")
        if low and high:
            return f"<{names[2]}>{base}{low}{high}</{names[2]}>"
        name = names[0] if low else names[1]
        return f"<{name}>{base}{low}{high}</{name}>" if low or high else base

    def _script(self, opening: str, closing: str) -> str:
        if self._peek() == opening:
            self._next()
            return self.row(closing)
        if opening == "(":
            return self._atom()
        return "<mrow>" + "".join(f"<mi>{_escaped(letter)}</mi>" for letter in self._next()) + "</mrow>"

    def _limits(self) -> tuple[str, str]:
        """The limits of a sum: {t=j..i} below and above, any other text below."""
        text = ""
        if self._peek() == "{":
            self._next()
            while (token := self._next()) not in ("}", ""):
                text += token
        first, _, last = text.partition("..")
        return _Parser(first).row(None), _Parser(last).row(None) if last else ""

    def _atom(self) -> str:
        token = self._next()
        if token in OPENING:
            closing = OPENING[token]
            return f"<mrow>{_fence(token)}{self.row(closing)}{_fence(closing)}</mrow>"
        indexed = SYMBOL.fullmatch(token)
        if indexed:
            return f"<msub><mi>{_escaped(indexed[1])}</mi><mn>{indexed[2]}</mn></msub>"
        if token in UPRIGHT:
            return f"<mi>{UPRIGHT[token]}</mi>"
        if token[:1].isdigit():
            return f"<mn>{token}</mn>"
        if token[:1].isalpha() and token not in SUMS:
            return f"<mi>{_escaped(token)}</mi>"  # more than one letter are upright
        return f"<mo>{_escaped(token)}</mo>"


def _fence(sign: str) -> str:
    return f'<mo stretchy="false" lspace="0" rspace="0">{_escaped(sign)}</mo>'


def _escaped(text: str) -> str:
    return html.escape(text)
