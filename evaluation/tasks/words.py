"""The words of the tasks. No word is in two lists, and none occurs in small talk."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KEYS = words(
    "gate mill barn dock cave tower bridge cellar attic kitchen chapel market station stable forge pier orchard "
    "meadow castle tunnel school studio office garage cabin depot vault shed pond dam fort camp inn farm bank lab gym "
    "pool court arena yard hall lodge temple prison island valley canyon desert forest beach cliff ridge swamp reef "
    "creek trail summit harbor hostel cottage villa bunker shelter tent shrine canal lock ferry mast locker"
)
COLORS = words(
    "red blue green gold pink black white gray brown silver orange violet amber ivory jade teal coral copper lime plum"
)
ANIMALS = words(
    "fox owl wolf bear hawk deer hare lynx crow swan duck goat seal crab frog toad newt mole otter raven robin heron "
    "eagle tiger"
)
NAMES = words("Nora Ben Ada Tom Mia Leo Eva Max Ida Sam Zoe Kai Lea Jon Amy Dan Eli Fay Gus Ivy Kim Meg Ned Pia")
TRIGGERS = words(
    "badge password motto slogan signal permit ticket receipt license anthem emblem toast riddle oath proverb verdict "
    "warrant voucher alibi curfew"
)
VARIABLES = words("b c d e f g h k m n p q r s t u v w x y z")
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
NOUNS = ("code", "label", "mark", "tag", "number", "sign", "word", "name")
AFFIXES = ("over", "sir", "roger", "amen", "indeed", "done", "right")
