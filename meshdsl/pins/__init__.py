"""What the user fixed: globs over argument paths and logical-axis rules, resolved to layouts and checked."""

from meshdsl.pins.read import UserPins, follows, make_pins

__all__ = ["UserPins", "follows", "make_pins"]
