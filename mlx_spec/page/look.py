"""How the page looks, and the prompts it offers."""

EXAMPLES = {
    "Prose": ["Explain in three sentences why the sea is salty.",
              "Tell a short story about a lighthouse keeper who finds a message in a bottle."],
    "Code": ["Write a Python function that merges two sorted lists, with a docstring and two tests.",
             "Write an SQL query that lists the ten customers with the highest total of orders, and explain it."],
    "Maths": ["What is 17 * 23? Show each step.",
              "A train covers 180 km in 2 hours and then 90 km in 1.5 hours. What is its average speed?"],
    "Translation": ["Translate into French: The library opens at nine and closes at six.",
                    "Translate into German, sentence by sentence: I lost my umbrella. Have you seen it? It is red."],
    "Edit this text": ["Correct the spelling and change nothing else: The wether was beautifull, so we went too the beech.",
                       "Rewrite as a list with one item a line: For the cake we need flour, sugar, four eggs, butter and a lemon."],
}

LEGEND = ('<div class="legend"><span class="t accepted">accepted</span> draft was right '
          '<span class="t correction">correction</span> draft was wrong '
          '<span class="t bonus">bonus</span> after a full run '
          '<span class="t plain">plain</span> one at a time <i>hover: probability under the target</i></div>')

HEAD = """<script>
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape") { const b = document.querySelector("#stop"); if (b) b.click(); }
});
</script>"""

CSS = """
.gradio-container { max-width: 1240px !important; margin: 0 auto !important; }
gradio-app, .gradio-container { width: 100%; }
body:not(.dark), body:not(.dark) gradio-app { background: #f4f6f8 !important; }
.gradio-container { background: transparent !important; }
#box textarea { border: 1px solid var(--border-color-primary) !important; }
:root { --won: #15803d; --lost: #b45309; --bad: #b91c1c; --acc: #15803d; --cor: #b45309; --bon: #1d4ed8; }
.dark { --won: #4ade80; --lost: #fbbf24; --bad: #f87171; --acc: #86efac; --cor: #fcd34d; --bon: #93c5fd; }
#title { display: flex; align-items: baseline; gap: .75rem; flex-wrap: wrap; }
#title b { font-size: 1.5rem; letter-spacing: -.02em; }
#title span, .legend, .facts, .place { color: var(--body-text-color-subdued); font-size: .85rem; }
.banner { font-size: .9rem; padding: .35rem .7rem; border-left: 3px solid var(--won); background: var(--background-fill-secondary);
  overflow-wrap: anywhere; }
.banner.loading { border-color: var(--bon); } .banner.off { border-color: var(--lost); color: var(--lost); }
.banner.bad { border-color: var(--bad); color: var(--bad); }
.banner progress { width: 9rem; vertical-align: middle; margin-left: .6rem; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem .8rem; margin: .35rem 0; border-radius: .8rem; max-width: 85%;
  background: var(--background-fill-secondary); width: fit-content; }
.said.user { margin-left: auto; background: var(--color-accent-soft); }
.verdict { text-align: center; font-size: 1.05rem; padding: .1rem; }
.verdict b { font-size: 1.7rem; letter-spacing: -.02em; }
.verdict.won b { color: var(--won); } .verdict.lost b { color: var(--lost); } .verdict.bad { color: var(--bad); font-weight: 600; }
body:not(.dark) .racer { background: #fff; }
.racer { border: 1px solid var(--border-color-primary); border-radius: .8rem; padding: .8rem 1rem; background: var(--block-background-fill);
  gap: .4rem !important; min-width: min(330px, 100%) !important; }
.lane { display: flex; justify-content: space-between; align-items: baseline; }
.lane .name { font-weight: 600; text-transform: capitalize; } .lane .speed b { font-size: 1.6rem; font-variant-numeric: tabular-nums; }
.lane.speculative .name { color: var(--won); }
.facts { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-variant-numeric: tabular-nums; }
.facts b { color: var(--body-text-color); font-weight: 600; }
.reply { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.65; margin-top: .6rem; min-height: 9rem; max-height: 21rem;
  overflow-y: auto; display: flex; flex-direction: column-reverse; }
.reply > div { margin-bottom: auto !important; }
.answer { max-height: 21rem; overflow-y: auto; }
.t { text-decoration-thickness: 1.5px; text-underline-offset: 3px; }
.t.accepted { color: var(--acc); text-decoration: underline solid; text-decoration-thickness: 1.5px; }
.t.correction { color: var(--cor); text-decoration: underline wavy; text-decoration-thickness: 1px; font-weight: 600; }
.t.bonus { color: var(--bon); text-decoration: underline dotted; text-decoration-thickness: 2px; font-weight: 600; }
.t.blank { text-decoration: none; }
.legend .t, .legend i { margin-left: .7rem; } .legend .t:first-child { margin-left: 0; }
.thought { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem; color: var(--body-text-color-subdued); margin-top: .5rem; }
.thought summary { cursor: pointer; }
#place:not(:has(.place)) { display: none; } .legend i { color: inherit; } .gradio-container .html-container { padding: 0 !important; }
.place.bad { color: var(--bad); }
@media (max-width: 640px) { .gradio-container { padding: .4rem !important; }
  #race { flex-direction: column; } .verdict b { font-size: 1.35rem; } }
footer { display: none !important; }
"""
