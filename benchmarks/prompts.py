"""Ten prompts of several kinds, written for this benchmark: (kind, text)."""

PROMPTS = [
    ("chat", "I moved to a small town by the sea last month and I still don't know anyone. What could I do this "
             "weekend to meet a few people without spending much?"),
    ("explanation", "Explain to a curious twelve-year-old why a bicycle stays upright when it is moving but falls over "
                    "when it stands still."),
    ("code", "Write a Python function `merge_intervals(intervals)` that takes a list of (start, end) pairs and returns "
             "them sorted, with overlapping ones joined. Add a docstring and two examples."),
    ("maths", "A bakery sells rolls in bags of six and bags of ten. Nadia buys four small bags and three large ones, "
              "gives eleven rolls to her neighbour and shares the rest equally among nine guests. How many rolls are "
              "left over? Show every step."),
    ("translation", "Translate into French: The ferry leaves at half past seven. Please keep your ticket until you "
                    "arrive, and do not leave your bags on the stairs."),
    ("list", "List eight things to check before renting out a spare room, each with one short reason."),
    ("edit", "Correct the spelling and grammar of this text and change nothing else:\n\n"
             "Yesterday we was walking threw the old part of the city when it begun to rain very hardly. We runned under "
             "the roof of a bookshop, were a kindly woman gived us a cup of tea and showed us her collection of mapps."),
    ("summary", "Summarise this in two sentences:\n\n"
                "The valley's first mill was built in 1782 to grind barley. When the railway arrived it was turned into "
                "a paper works, and for sixty years it made the brown paper in which half the county wrapped its bread. "
                "The works closed in 1951. After standing empty for a generation the building was bought by four potters, "
                "who put their kiln where the great wheel had been, and today it holds a school, two workshops and a "
                "small museum of the valley's trades."),
    ("story", "Write the opening of a story about a lighthouse keeper who finds a letter in a bottle, addressed to her."),
    ("data", "Turn these notes into a JSON array of objects with the keys name, city and age:\n\n"
             "Ines lives in Porto and is 34. Tomasz, 51, comes from Gdansk. Yuki is 28 and her home is Sapporo. "
             "Old Mr Brandt, who is 79, has never left Bremen."),
]
