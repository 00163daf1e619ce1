"""The bench: is speculation faster here, by how much and for which text, and is the output the same?

    texts.py    the prompts                     arms.py     one reply of one engine
    stats.py    intervals, the machine's drift  run.py      what runs, in which order
    card.py     the machine and the models      record.py   what the JSON holds, and its check
    figures.py  rows and advice of the runs     render.py   Markdown and CSV; plot.py: PNG
    compare.py  several records side by side

The JSON record is the source; everything printed or drawn is made of it.
"""
