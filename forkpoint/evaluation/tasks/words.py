"""The words that tasks are made of. No word is in two lists, and none occurs in small talk."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KEYS = words(
    "gate mill barn dock cave well tower bridge cellar attic kitchen chapel market station museum stable bakery "
    "forge pier quarry orchard meadow castle tunnel theatre school clinic studio office garage cabin hangar depot "
    "vault shed pond dam fort camp inn farm bank lab gym pool court plaza arena yard hall lodge tavern palace temple "
    "prison island valley canyon desert forest jungle lagoon beach cliff ridge crater swamp delta oasis reef creek "
    "trail summit basin harbor airport hostel cottage villa mansion bunker shelter tent igloo shrine abbey crypt "
    "wharf canal lock weir ferry buoy mast cabinet drawer closet locker"
)
COLORS = words(
    "red blue green gold pink black white gray brown silver purple orange violet amber ivory jade teal navy coral "
    "copper lime olive rose plum"
)
ANIMALS = words(
    "fox owl wolf bear hawk deer hare lynx crow swan duck goat seal crab frog toad newt mole mouse otter raven robin "
    "heron eagle tiger zebra camel horse snail whale shark badger"
)
NAMES = words(
    "Nora Ben Ada Tom Mia Leo Eva Max Ida Sam Zoe Kai Lea Jon Amy Dan Eli Fay Gus Hal Ivy Jim Kim Lou Meg Ned Pia Ray "
    "Sue Ted Una Val Wes Yan"
)
TRIGGERS = words(
    "badge password motto slogan signal permit passport ticket receipt invoice license anthem emblem toast riddle "
    "blessing greeting oath proverb verdict warrant voucher alibi curfew"
)
VARIABLES = words("a b c d e f g h k m n p q r s t u v w x y z")
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
NOUNS = ("code", "label", "mark", "tag", "number", "sign")
ENDINGS = ("over", "sir", "roger", "amen", "thanks", "cheers", "done", "right")
