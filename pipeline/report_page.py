"""The report's page: a Jinja2 template. It loads nothing and runs nothing; see its first lines."""

STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace;
  --page: #f6f7f9; --card: #ffffff; --ink: #16191f; --muted: #59616e; --line: #dfe3e9;
  --accent: #2f6fde; --good: #137a4b; --look: #9a5b00; --good-fill: #e5f5ec; --look-fill: #fff2dc;
  --series-0: #2f6fde; --series-1: #e08a1e; --series-2: #1c9a7c;
  --series-3: #9255d4; --series-4: #d0457f; --series-5: #6d7785;
  --red: #d33a3a; --green: #2a9d4a; --blue: #2f6fde;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #181c22; --ink: #e8ebf0; --muted: #a0a9b7; --line: #2d333d;
    --accent: #6ea2ff; --good: #5fd39a; --look: #f0b35a; --good-fill: #12291f;
    --look-fill: #2e2312;
    --series-0: #6ea2ff; --series-1: #f2a94a; --series-2: #45c9a6;
    --series-3: #bd8cf2; --series-4: #f27fae; --series-5: #98a3b3;
    --red: #ff7b7b; --green: #5fd37f; --blue: #6ea2ff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 var(--font); }
main, header, footer { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.25rem; }
h3 { margin: 0 0 .5rem; font-size: 1rem; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
a { color: inherit; }
.quiet, figcaption { color: var(--muted); }
.quiet { overflow-wrap: anywhere; }
.small, figcaption { font-size: .875rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 1px;
  margin: 1.25rem 0 0; background: var(--line); border: 1px solid var(--line);
  border-radius: .75rem; overflow: hidden; }
.facts div { background: var(--card); padding: .75rem 1rem; }
.facts dt { color: var(--muted); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.notes { list-style: none; margin: 1rem 0 0; padding: 0; display: grid; gap: .5rem; }
.notes li { display: flex; gap: .75rem; align-items: baseline; padding: .5rem .875rem;
  border-radius: .5rem; overflow-wrap: anywhere; }
.notes b { flex: none; font-size: .8125rem; width: 2.5rem; }
.notes .good { background: var(--good-fill); } .notes .good b { color: var(--good); }
.notes .look { background: var(--look-fill); } .notes .look b { color: var(--look); }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .75rem;
  padding: 1rem; margin: 0; min-width: 0; }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.stack { display: grid; gap: 1rem; align-content: start; min-width: 0; }
.card svg { display: block; width: 100%; height: auto; max-width: 27rem; margin: .25rem auto 0;
  stroke-linejoin: round; }
figcaption { margin-top: .5rem; }
.scroll { overflow-x: auto; }
figure table { font-size: .875rem; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .375rem .625rem .375rem 0;
  border-bottom: 1px solid var(--line); unicode-bidi: isolate; }
th { color: var(--muted); font-weight: 500; font-size: .8125rem; }
tr:last-child > td { border-bottom: 0; }
td.term { color: var(--muted); white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 7rem; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
tr.total td { font-weight: 600; border-top: 2px solid var(--line); }
.zero { color: var(--look); font-weight: 600; }
code, pre { font-family: var(--mono); font-size: .8125rem; }
code { overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.55; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
summary .quiet { font-weight: 400; }
details > :nth-child(2) { margin-top: .75rem; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(4.25rem, 1fr));
  gap: .375rem; margin: .25rem 0 .875rem; }
.sheet:last-child { margin-bottom: 0; }
.sheet img { width: 100%; height: auto; aspect-ratio: 1; object-fit: contain;
  background: var(--page); border-radius: .375rem; display: block; }
.sheet img.tiny { image-rendering: pixelated; }
.split { display: inline-block; width: .625rem; height: .625rem; border-radius: .1875rem;
  margin-right: .375rem; }
footer { margin-top: 3rem; padding-bottom: 2rem; color: var(--muted); font-size: .8125rem; }
@media (min-width: 60rem) { .sheet { grid-template-columns: repeat(12, minmax(0, 1fr)); } }
@media (max-width: 40rem) {
  .spare, .rows thead { display: none; }
  table { font-size: .875rem; }
  th, td { padding-right: .5rem; }
  td.name { min-width: 5rem; }
  .rows td { display: block; padding: .125rem 0; border: 0; }
  .rows td:last-child { padding-bottom: .5rem; border-bottom: 1px solid var(--line); }
  .rows tr:last-child > td:last-child { border: 0; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{{ name }}: data set report</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1><bdi>{{ name }}</bdi></h1>
<p class="quiet"><bdi>{{ directory }}</bdi></p>
<dl class="facts">
{% for term, value in facts %}
<div><dt>{{ term }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
<ul class="notes">
{% for note in notes %}
<li class="{{ note.level }}"><b>{{ note.level }}</b><span>{{ note.text }}</span></li>
{% endfor %}
</ul>
</header>
<main>

<h2 id="classes">Classes and splits</h2>
<div class="grid">
{% if manifest.labels %}
<figure class="card">{{ plots.classes }}
{% if manifest.label_kind == "many" %}
<figcaption>A record counts for each of its classes.</figcaption>
{% endif %}
{% if manifest.labels | length > most_bars %}
<figcaption>The {{ most_bars }} largest of {{ manifest.labels | length | count }} classes.\
</figcaption>
{% endif %}
</figure>
{% endif %}
<div class="card"><div class="scroll"><table>
<thead><tr><th>class</th><th class="number spare">id</th>
{% for split in splits %}
<th class="number"><bdi>{{ split.name }}</bdi></th>
{% endfor %}
<th class="number">all</th></tr></thead>
<tbody>
{% for row in classes %}
<tr><td class="name">{{ row.label }}</td><td class="number spare">{{ row.id }}</td>
{% for number in row.counts %}
<td class="number{{ '' if number else ' zero' }}">{{ number | count }}</td>
{% endfor %}
<td class="number">{{ row.counts | sum | count }}</td></tr>
{% endfor %}
{% if manifest.labels | length > classes | length %}
<tr><td class="quiet" colspan="{{ splits | length + 3 }}">\
and {{ (manifest.labels | length - classes | length) | count }} more, in dataset.json</td></tr>
{% endif %}
<tr class="total"><td>all</td><td class="spare"></td>
{% for split in splits %}
<td class="number">{{ split.records | count }}</td>
{% endfor %}
<td class="number">{{ manifest.records | count }}</td></tr>
</tbody></table></div></div>
</div>

<h2 id="pictures">Pictures</h2>
<p class="quiet small">Out of the records themselves, made small. The first of each class in each \
split; records lie in the order of a hash, so these are a sample. Keys show under the pointer.\
{% if left_out %}
 {{ left_out | count }} classes in a split are not shown, to keep this file small.
{% endif %}
</p>
<div class="stack">
{% for sheet in sheets %}
<details class="card"{{ ' open' if loop.index <= 12 else '' }}>
<summary><bdi>{{ sheet.label }}</bdi></summary>
{% for part in sheet.parts %}
<div class="small quiet"><span class="split" style="background: var(--series-{{ part.series }})">\
</span><bdi>{{ part.split }}</bdi>: {{ part.thumbnails | length }} of {{ part.records | count }}\
</div>
<div class="sheet">
{% for picture in part.thumbnails %}
<img src="{{ picture.uri }}" alt="{{ picture.pick.key }}" title="{{ picture.pick.key }}"\
 width="{{ picture.width }}" height="{{ picture.height }}"\
{% if picture.width < 64 and picture.height < 64 %} class="tiny"{% endif %}>
{% endfor %}
</div>
{% endfor %}
</details>
{% endfor %}
</div>

<h2 id="sources">Sources</h2>
<div class="grid">
<figure class="card"><h3>Width and height</h3>{{ plots.sides }}
<figcaption>Upright, before resizing. {{ ranges.source_width | span }} wide, \
{{ ranges.source_height | span }} high, in pixels. Darker or brighter: more records, on a \
logarithmic scale.</figcaption></figure>
<figure class="card"><h3>Aspect ratio</h3>{{ plots.aspects }}
<figcaption>Bins of equal ratio, an eighth of an octave wide.</figcaption></figure>
<figure class="card"><h3>File size</h3>{{ plots.source_bytes }}
<figcaption>{{ ranges.source_bytes.low | bytes }} to {{ ranges.source_bytes.high | bytes }}, \
mean {{ ranges.source_bytes.mean | bytes }}.</figcaption></figure>
</div>

<h2 id="records">Records</h2>
<div class="grid">
<figure class="card"><h3>Channel means</h3>{{ plots.channels }}
<figcaption>Of each record one mean a channel, from the exact sums in index/: how bright and how \
coloured whole pictures are. It is not a histogram of pixels; for that, every picture would have \
to be decoded.{% if moments %} Over all pixels of the training split: {{ moments }}, scale 0 to 1.\
{% endif %}
</figcaption></figure>
<figure class="card"><h3>Record size</h3>{{ plots.record_bytes }}
<figcaption>With framing and labels. {{ ranges.size.low | bytes }} to \
{{ ranges.size.high | bytes }}, mean {{ ranges.size.mean | bytes }}.</figcaption></figure>
<figure class="card"><h3>Shards</h3>{{ plots.shards }}
<div class="scroll"><table>
<thead><tr><th>split</th><th class="number">shards</th><th class="number">smallest</th>\
<th class="number">largest</th><th class="number">all</th></tr></thead>
<tbody>
{% for split in splits %}
<tr><td><bdi>{{ split.name }}</bdi></td>\
<td class="number">{{ split.shards | length | count }}</td>\
{% if split.shards %}
<td class="number">{{ split.shards | min | bytes }}</td>\
<td class="number">{{ split.shards | max | bytes }}</td>\
{% else %}
<td class="number">-</td><td class="number">-</td>\
{% endif %}
<td class="number">{{ split.shards | sum | bytes }}</td></tr>
{% endfor %}
</tbody></table></div></figure>
</div>

<h2 id="rejects">Rejects</h2>
{% if not rejects %}
<p class="quiet">Every input became a record.</p>
{% endif %}
<div class="stack">
{% for reason in rejects %}
<details class="card"{{ ' open' if loop.first else '' }}>
<summary>{{ reason.reason }} <span class="quiet">{{ reason.count | count }}</span></summary>
<div class="scroll"><table class="rows">
<thead><tr><th>path</th><th>what was said</th></tr></thead>
<tbody>
{% for item in reason.listed %}
<tr><td class="name"><code>{{ (item.path or item.key) | cut }}</code></td>\
<td class="name">{{ item.detail | cut }}</td></tr>
{% endfor %}
{% if reason.count > reason.listed | length %}
<tr><td class="quiet" colspan="2">and {{ (reason.count - reason.listed | length) | count }} more, \
in rejects.jsonl</td></tr>
{% endif %}
</tbody></table></div>
</details>
{% endfor %}
</div>
{% if manifest.skipped %}
<p class="quiet small">System files that were passed over: {{ manifest.skipped | count }}.</p>
{% endif %}

<h2 id="duplicates">Duplicates and label conflicts</h2>
{% if not contents %}
<p class="quiet">No content stands under several keys.</p>
{% else %}
<details class="card" open>
<summary>{{ contents | length | count }} content{{ '' if contents | length == 1 else 's' }} \
under several keys <span class="quiet">\
{{ conflicts | count }} with several labels, {{ leaks | count }} in several splits</span></summary>
<div class="scroll"><table class="rows">
<thead><tr><th>labels</th><th>splits</th><th>keys</th></tr></thead>
<tbody>
{% for content in contents[:most_contents] %}
<tr><td class="name{{ ' zero' if content.labels | length > 1 else '' }}">\
{% for label in content.labels[:8] %}
<bdi>{{ label | cut }}</bdi>{{ ', ' if not loop.last else '' }}\
{% endfor %}
</td>
<td>{{ content | splits_of | join(', ') }}</td>
<td class="name">\
{% for key in content.keys[:4] %}
<code>{{ key | cut }}</code>{{ ', ' if not loop.last else '' }}\
{% endfor %}
{{ ' and %d more' % (content.keys | length - 4) if content.keys | length > 4 else '' }}</td></tr>
{% endfor %}
{% if contents | length > most_contents %}
<tr><td class="quiet" colspan="3">and {{ (contents | length - most_contents) | count }} more, in \
duplicates.jsonl</td></tr>
{% endif %}
</tbody></table></div>
</details>
{% endif %}

<h2 id="again">Make it again, read it</h2>
<div class="grid wide">
<div class="stack"><div class="card"><h3>The command</h3><pre id="command">{{ command }}</pre></div>
<div class="card"><h3>With tpufeed's reader</h3><pre id="reader">{{ reader }}</pre></div></div>
<div class="card"><h3>With TensorFlow alone</h3>
<pre id="plain-reader">{{ plain_reader }}</pre></div>
</div>
<p class="quiet small">Equal inputs and equal versions of the libraries give equal bytes. Options \
of Beam, such as the number of workers, change none. The folder must be empty, or add \
--overwrite.</p>

<h2 id="configuration">Configuration</h2>
<div class="grid">
<div class="card"><h3>As it was given</h3><table><tbody>
{% for term, value in configuration %}
<tr><td class="term">{{ term }}</td><td class="name"><code>{{ value | cut }}</code></td></tr>
{% endfor %}
</tbody></table></div>
<div class="card"><h3>Made with</h3><table><tbody>
<tr><td class="term">fingerprint</td>\
<td class="name"><code>{{ manifest.fingerprint }}</code></td></tr>
<tr><td class="term">tpufeed</td><td class="name"><code>{{ manifest.tpufeed }}</code></td></tr>
{% for term, value in manifest.libraries.items() %}
<tr><td class="term">{{ term }}</td><td class="name"><code>{{ value }}</code></td></tr>
{% endfor %}
</tbody></table></div>
</div>
</main>
<footer>Written by tpufeed report {{ version }}, from dataset.json, index/ and the records shown. \
It does not read every byte; tpufeed verify does.</footer>
</body>
</html>
"""
