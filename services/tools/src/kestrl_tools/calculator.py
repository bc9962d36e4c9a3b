"""A calculator as a tool. Expressions are parsed, never evaluated as code; sizes are bounded before results are
computed.

Numbers are exact fractions where possible, so that 0.1 + 0.2 is 0.3.
"""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from kestrl.tools import ToolError

MAX_LENGTH = 300
"""Maximum characters of an expression; keeps its depth far below Python's recursion limit."""
MAX_BITS = 1024
"""Maximum bits of a numerator or denominator, about 300 digits."""
DIGITS = 12
"""Significant digits of a result that is not a whole number."""


def calculator(expression: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: Such as "(3 + 4) * 2.5". Has + - * / // % ** and abs, ceil, floor, max, min, round, sqrt.
    """
    try:
        # Checked here too, since the tool may be called without the service.
        if len(expression) > MAX_LENGTH:
            raise ToolError(f"The expression is longer than {MAX_LENGTH} characters.")
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression.") from error
    try:
        return _written(_value(tree.body))
    except ZeroDivisionError as error:
        raise ToolError("Division by zero.") from error
    except OverflowError as error:
        raise ToolError("A number on the way is too large.") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(_exact(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(_binary(op, _value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _bounded(_call(name, [_value(argument) for argument in arguments]))
        case ast.Tuple():
            raise ToolError("Write large numbers without commas: 1000, not 1,000.")
        case _:
            raise ToolError(f"{ast.unparse(node)[:40]!r} is not arithmetic that this calculator knows.")


def _binary(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
        case ast.BitXor():
            raise ToolError("Write ** for powers, not ^.")
        case _:
            raise ToolError("This calculator has only the operators + - * / // % **.")


def _call(name: str, arguments: list[Fraction]) -> Fraction:
    match name, arguments:
        case "abs", [value]:
            return abs(value)
        case "ceil", [value]:
            return Fraction(math.ceil(value))
        case "floor", [value]:
            return Fraction(math.floor(value))
        case "max", [_, *_]:
            return max(arguments)
        case "min", [_, *_]:
            return min(arguments)
        case "round", [value]:
            return Fraction(round(value))
        case "round", [value, digits]:
            return _round(value, digits)
        case "sqrt", [value]:
            return _power(value, Fraction(1, 2))
        case _:
            raise ToolError(
                f"There is no {name} of {len(arguments)} numbers; there are abs, ceil, floor, max, min, round, sqrt."
            )


def _exact(number: float) -> Fraction:
    if isinstance(number, float) and not math.isfinite(number):
        raise OverflowError
    # From the shortest decimal form: 0.1 means a tenth, not the nearest binary fraction.
    return Fraction(repr(number))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        # |base| of 0 and 1 stay small whatever the exponent; anything else grows by its bits.
        if abs(base) not in (0, 1) and (bits - 1) * abs(exponent.numerator) > MAX_BITS:
            raise OverflowError
        return Fraction(base**exponent.numerator)
    if base < 0:
        raise ToolError("The root of a negative number is not a real number.")
    return _root(base, exponent)


def _root(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent == Fraction(1, 2):
        top, bottom = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if top * top == base.numerator and bottom * bottom == base.denominator:
            return Fraction(top, bottom)
    return _exact(float(base) ** float(exponent))


def _round(value: Fraction, digits: Fraction) -> Fraction:
    if digits.denominator != 1 or abs(digits) > 50:
        raise ToolError("round takes a whole number of digits, at most 50.")
    return Fraction(round(value, int(digits)))


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    approximate = float(value)
    return f"{approximate:.{DIGITS}g}"
