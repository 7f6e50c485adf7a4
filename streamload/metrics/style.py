"""The style sheet of a report (report.py): light or dark, as the reader's system is."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2128;--soft:#5b6673;--line:#e3e7ec;--card:#f7f8fa;
--good:#1a7f4b;--fair:#a86400;--bad:#c0362c;--c0:#3b6fd4;--c1:#e08a1e;--c2:#2f9e6e;--c3:#c9433f;
--c4:#8b5fc7;--c5:#7d6a5a;--c6:#d565a8;--c7:#6b7785;--c8:#a9a430;--c9:#2ba3b8}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e4e8ed;--soft:#98a4b1;--line:#2b323b;
--card:#1b2027;--good:#4cc38a;--fair:#e5a54a;--bad:#f2766b;--c0:#6f9bf0;--c1:#f0a750;--c2:#54c492;
--c3:#f07570;--c4:#b190ea;--c5:#b39d8a;--c6:#ee90c6;--c7:#9aa6b4;--c8:#cfca5e;--c9:#5fcadb}}*{
box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}main{max-width:1200px;margin:0 auto;padding:24px 20px 40px}h1{
font-size:24px;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 6px}.sub,footer{
color:var(--soft);margin:2px 0 16px}section{margin:16px 0}.verdict{border-left:5px solid;
padding:12px 16px;background:var(--card);border-radius:4px}.verdict p{margin:0}.good{
border-color:var(--good)}.fair{border-color:var(--fair)}.bad{border-color:var(--bad)}dl{display:grid;
grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}dl div{
background:var(--card);border-radius:4px;padding:8px 12px}dt{color:var(--soft);font-size:13px}dd{
margin:0;font-size:20px;font-variant-numeric:tabular-nums}.charts{display:grid;
grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}figure{margin:0;
background:var(--card);border-radius:4px;padding:12px;min-width:0}figcaption{font-size:13px;
color:var(--soft);min-height:38px}figcaption b{color:var(--fg);font-size:15px;display:block}svg{
display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.rule{
stroke:var(--line);stroke-width:1}ul{list-style:none;margin:6px 0 0;padding:0;display:flex;
flex-wrap:wrap;gap:2px 14px;font-size:13px}li{overflow-wrap:anywhere}li i{display:inline-block;
width:10px;height:10px;border-radius:2px;margin-right:6px}table{border-collapse:collapse;width:100%;
font-size:14px}td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}th{color:var(--soft);font-weight:normal}
"""
