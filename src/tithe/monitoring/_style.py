"""The style sheet of the report: light and dark by the reader's preference, no external file."""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fbfaf8; --card: #fff; --tint: #f4f1ea;
  --ink: #1c1b19; --soft: #67635c; --line: #e4e0d8; --grid: #ece8e0; --base: #b9b3a7;
  --good: #1b7a43; --bad: #b3261e; --warn: #8a5a00;
  --c1: #2459c2; --c2: #c2570c; --c3: #0f7b74; --c4: #7a45b8; --c5: #b02a66; --c6: #8d887d;
  --text: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #151514; --card: #1d1d1b; --tint: #242321;
    --ink: #ece9e3; --soft: #a39e94; --line: #34322e; --grid: #2a2926; --base: #5c5850;
    --good: #6cc98f; --bad: #ff8a80; --warn: #e6b45c;
    --c1: #82aaff; --c2: #f2a263; --c3: #57c4ba; --c4: #bd9df2; --c5: #f08fb4; --c6: #8f8a80;
  }
}
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 var(--text) }
main, .top, .foot { max-width: 1120px; margin: 0 auto; padding: 0 28px }
p { max-width: 75ch }
a, summary { color: var(--c1) }
a { text-decoration: none }
a:hover, a:focus-visible { text-decoration: underline }
:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px }
code { font: .92em var(--mono); overflow-wrap: anywhere }
section { margin: 52px 0 0; scroll-margin-top: 16px }
h1 { margin: 2px 0 6px; font-size: 32px; font-weight: 650; line-height: 1.2; overflow-wrap: anywhere }
h2 { margin: 0 0 14px; font-size: 21px; font-weight: 650 }
h3 { margin: 26px 0 10px; font-size: 15px; font-weight: 650 }

.top { padding-top: 44px }
.kicker, .lead { margin: 0; color: var(--soft) }
.kicker { font-size: 13px }
nav { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 20px 0 0; padding: 10px 0;
  border-block: 1px solid var(--line); font-size: 14px }
.about { margin: -8px 0 14px; color: var(--soft) }
.notice, .alarm { padding: 10px 16px; border-left: 3px solid var(--warn); border-radius: 0 6px 6px 0;
  background: var(--tint) }
.notice { margin: 22px 0 0 }
.notice p { margin: 0; font-weight: 600 }
.notice ul { margin: 4px 0 0; padding-left: 18px }
.alarm { margin: 0 0 10px; border-color: var(--bad) }
.alarm p { margin: 2px 0 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 18px 28px; margin: 22px 0 0 }
.tiles dt { color: var(--soft); font-size: 13px }
.tiles dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap }
.tiles small { display: block; color: var(--soft); font-size: 13px; font-weight: 400; white-space: normal }

.scroll { overflow-x: auto }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { padding-top: 10px; caption-side: bottom; text-align: left; color: var(--soft); font-size: 13px }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: baseline }
thead th { color: var(--soft); font-size: 13px; font-weight: 500 }
tbody th { font-weight: 400 }
th:last-child, td:last-child { padding-right: 0 }
.num { text-align: right }
.dense { font-size: 12.5px }
.dense th, .dense td { padding: 3px 14px 3px 0; white-space: nowrap }
.result td, .result th { padding-block: 12px; white-space: nowrap; vertical-align: middle }
.result thead th { padding-block: 0 6px; vertical-align: bottom }
.result b { font-size: 22px; font-weight: 650 }
.result tbody th { font-weight: 500 }
.result .ci { margin-left: 8px; color: var(--soft); font-size: 13px }
.result .minor b { font-size: 15px; font-weight: 400 }
.result .minor th { font-weight: 400; color: var(--soft) }
.result .minor th, .result .minor td { padding-block: 4px }
.result .plot { width: 32%; min-width: 200px; padding-left: 16px }
.result svg { display: block; width: 100% }
.up { color: var(--good) }
.down { color: var(--bad) }
circle.was { fill: var(--bg); stroke: var(--soft); stroke-width: 2 }
circle.is { fill: var(--c1); stroke: var(--c1); stroke-width: 2 }
line.was { stroke: var(--soft); stroke-width: 5; opacity: .35 }
line.is { stroke: var(--c1); stroke-width: 5; opacity: .4 }

.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); column-gap: 44px }
figure { display: grid; grid-row: span 4; grid-template-rows: subgrid; min-width: 0; margin: 0 0 28px }
figcaption { grid-row: 1 } .legend { grid-row: 2 } .chart, .empty p { grid-row: 3 } .note { grid-row: 4 }
figcaption { display: flex; align-items: baseline; justify-content: space-between; gap: 12px }
figcaption .name { font-weight: 600 }
.unit, .now, .note, .legend, .empty p { color: var(--soft); font-size: 13px; font-weight: 400 }
.now { font-variant-numeric: tabular-nums; white-space: nowrap }
.note, .empty p { margin: 0 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0; padding: 0; list-style: none }
.legend b { color: var(--ink); font-weight: 500; font-variant-numeric: tabular-nums }
.key { width: 12px; height: 10px; margin-right: 6px }
.chart { display: block; width: 100%; margin-top: 4px }
svg text { font: 12px var(--text); font-variant-numeric: tabular-nums; fill: var(--soft) }
.end { text-anchor: end }
.mid { text-anchor: middle }
.grid { stroke: var(--grid) }
.base { stroke: var(--base) }
.s1 { --c: var(--c1) } .s2 { --c: var(--c2) } .s3 { --c: var(--c3) }
.s4 { --c: var(--c4) } .s5 { --c: var(--c5) } .s6 { --c: var(--c6) }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.faint { stroke-width: 1; opacity: .45 }
.area, .band, .dot { fill: var(--c) }
polygon.area { stroke: var(--bg); stroke-width: 1 }
.band { opacity: .16 }
.dot { stroke: var(--bg); stroke-width: 1.5 }
.whisker { stroke: var(--c); stroke-width: 2; opacity: .5 }
.hint { fill: transparent }
.hint:hover { fill: var(--ink); fill-opacity: .06 }

.split { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0 48px;
  align-items: start }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 44px;
  align-items: start }
.samples h3 { margin-top: 4px }
.sample { margin: 0 0 18px; border: 1px solid var(--line); border-radius: 8px; background: var(--card);
  overflow: hidden }
.sample header { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; padding: 9px 14px;
  border-bottom: 1px solid var(--line); color: var(--soft); font-size: 13px }
.sample header b { color: var(--ink) }
.sample .reward { margin-left: auto; font-variant-numeric: tabular-nums }
.sample .asked { margin: 0; padding: 10px 14px 0; color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0; font: 13px/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4 }
.sample pre { max-height: 22em; padding: 10px 14px 12px; overflow: auto }
.cut { color: var(--soft); font-style: italic }
.settings { columns: 3 290px; column-gap: 44px }
.settings section { margin: 0 0 20px; break-inside: avoid }
.settings h3 { margin: 0 0 4px }
.settings table { font-size: 13px }
.settings th, .settings td { padding-block: 3px }
.settings th { color: var(--soft) }
.settings td { text-align: right; overflow-wrap: anywhere }
details { margin-top: 16px }
summary { cursor: pointer }
details > :not(summary) { margin-top: 14px }
.foot { margin-top: 56px; padding-bottom: 40px; color: var(--soft); font-size: 13px }
@media (max-width: 640px) {
  main, .top, .foot { padding-inline: 16px }
  .top { padding-top: 24px }
  h1 { font-size: 25px }
  .result td, .result th { white-space: normal }
  .result .ci { display: block; margin: 0 }
  .result b { font-size: 17px }
  .result b, .result span { white-space: nowrap }
  .result .plot { display: none }
}
@media print {
  nav { display: none }
  figure, .sample { break-inside: avoid }
}
"""
