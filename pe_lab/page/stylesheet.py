"""The CSS and the JavaScript of the page, as text to put inside it."""

from __future__ import annotations

import json
import re

CSS = """
:root{color-scheme:light dark;--bg:#fcfcfb;--panel:#fff;--ink:#1c2024;--soft:#5c636b;--line:#e3e4e1;
--faint:#f3f4f1;--edge:#9aa0a680;
--win:#00704f;--loss:#b23c00;--heat-rgb:0 128 92;--mark:#8a6d1d;
--c-rope:#5b6470;--c-pi:#b07100;--c-ntk:#1f7cbd;--c-yarn:#a8488b;--c-drope:#00805c;--c-nope:#c04a00;
--c-extra-1:#5a4fcf;--c-extra-2:#7a5c3a;--c-extra-3:#00788a;--c-extra-4:#a3123f;--c-ink:#1c2024}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--panel:#1b1f23;--ink:#e8eaec;--soft:#a2aab2;
--line:#30363c;
--faint:#22272c;--edge:#00000099;--win:#3ecf9f;--loss:#ff9a63;--heat-rgb:44 194 149;--mark:#d8b95a;
--c-rope:#aab3bf;--c-pi:#e6a92e;--c-ntk:#62b6ee;--c-yarn:#e08cc6;--c-drope:#2cc295;--c-nope:#f08a4b;
--c-extra-1:#a79ff5;--c-extra-2:#c7a27a;--c-extra-3:#4fc3d4;--c-extra-4:#f2799b;--c-ink:#e8eaec}}
*{box-sizing:border-box}
body{overflow-wrap:anywhere}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif}
main,header,footer{max-width:1160px;margin:0 auto;padding:0 24px}
header{padding-top:40px}
h1{font-size:clamp(23px,3.1vw,34px);line-height:1.25;letter-spacing:-.012em;font-weight:650;margin:6px 0 16px;
max-width:36em;text-wrap:pretty}
h1.long{font-size:clamp(20px,2.3vw,26px)}
h2{font-size:22px;line-height:1.3;letter-spacing:-.01em;margin:56px 0 10px;font-weight:650}
h3{font-size:17px;margin:32px 0 8px;font-weight:650}
.run>h2{border-top:3px solid var(--ink);padding-top:18px;font-size:26px;overflow-wrap:anywhere}
.run h3{font-size:20px;margin-top:44px}.member>h3{border-top:2px solid var(--line);padding-top:14px}
h4{font-size:17px;margin:28px 0 8px;font-weight:650}
p,li,dd{max-width:74ch}
.kicker{color:var(--soft);font-size:14px;margin:0;overflow-wrap:anywhere}
.kicker b{color:var(--ink);font-weight:600}
.points{margin:0;padding-left:20px}.points li{margin:3px 0}
.lede{font-size:17px;color:var(--ink);margin:0 0 6px}
.soft,figcaption,caption{color:var(--soft)}
small,.small{font-size:13px}
nav a{min-width:0}nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:22px 0 0;padding:10px 0;
border-top:1px solid var(--line);
border-bottom:1px solid var(--line);font-size:14px}
a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:3px}
a:hover{text-decoration-color:currentColor}
:focus-visible{outline:2px solid var(--c-ntk);outline-offset:2px}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
pre{background:var(--faint);border:1px solid var(--line);border-radius:6px;padding:12px 14px;overflow-x:auto;
margin:8px 0}
.command{white-space:pre-wrap;overflow-wrap:anywhere}
.summary{display:flex;flex-wrap:wrap;gap:8px 28px;margin:18px 0 0;padding:0}
.summary div{min-width:92px}.summary dt{font-size:12.5px;color:var(--soft)}
.summary dd{margin:0;font-weight:600;font-size:15px;font-variant-numeric:tabular-nums}
.note{border-left:3px solid var(--mark);background:var(--faint);padding:10px 14px;margin:14px 0;
max-width:80ch;border-radius:0 6px 6px 0}
.note p{margin:0}.note p+p{margin-top:6px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:22px;
align-items:start}
.grid.thirds{grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
.grid>*{min-width:0}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch;border:1px solid var(--line);border-radius:8px;
background:linear-gradient(90deg,var(--panel) 40%,transparent) 0/48px 100% no-repeat local,
linear-gradient(270deg,var(--panel) 40%,transparent) 100%/48px 100% no-repeat local,
linear-gradient(90deg,var(--edge),transparent) 0/18px 100% no-repeat,
linear-gradient(270deg,var(--edge),transparent) 100%/18px 100% no-repeat,var(--panel)}
table{border-collapse:collapse;font-size:14.5px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 10px;text-align:right;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;vertical-align:bottom;font-weight:600;white-space:nowrap}
thead small,td small{display:block;color:var(--soft);font-weight:400;font-size:12px;white-space:nowrap}
th:first-child,td.text,th.text{text-align:left}
tbody th{font-weight:500;text-align:left;min-width:132px;max-width:300px;overflow-wrap:break-word}
td{white-space:nowrap}td.text{white-space:normal;overflow-wrap:break-word;max-width:46ch}
.scores td{position:relative;background:rgb(var(--heat-rgb)/calc(var(--heat,0)*.42));min-width:60px;padding:6px 7px}
.scores td.trained,.scores th.trained{border-left:2px solid var(--mark);border-right:2px solid var(--mark)}
.scores th.trained{border-top:2px solid var(--mark);border-radius:4px 4px 0 0;color:var(--mark)}
.scores tr:last-child td.trained{border-bottom:2px solid var(--mark)}
.scores td b{font-weight:700}
.scores .ours th{font-weight:700}
.flag{font-style:normal;font-size:11px;margin-right:4px}
.title{font-weight:600;margin:0 0 6px}.title small{font-weight:400;color:var(--soft)}
.below{margin-top:22px}
.tasks,.harness{width:auto}
.tasks thead th{white-space:normal;overflow-wrap:normal;min-width:78px}.tasks thead small{white-space:normal}
.tasks .average{border-right:1px solid var(--line)}
.harness .average>*{border-top:2px solid var(--line);font-weight:650}
.harness thead th{white-space:normal;overflow-wrap:normal;min-width:78px}
.harness tbody th small{color:var(--soft);display:block}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:20px 26px;
align-items:start;margin:12px 0 6px}
.maps figure{margin:0;min-width:0;max-width:440px;break-inside:avoid}
.maps figcaption{font-weight:600;color:var(--ink);margin:0 0 4px}
.sideways{overflow-x:auto;-webkit-overflow-scrolling:touch}
.heat{width:max-content;min-width:100%;font-size:12.5px;line-height:1.3}
.heat th,.heat td{border:1px solid var(--bg);padding:3px 2px;text-align:center;white-space:nowrap;min-width:0}
.heat thead th{border-top:2px solid var(--bg);padding-bottom:4px}.heat thead small{font-size:11px}
.heat th:first-child{width:52px;padding-right:7px;text-align:right;color:var(--soft);font-weight:400;min-width:0}
.heat .trained{border-left:2px solid var(--mark);border-right:2px solid var(--mark)}
.heat th.trained{border-top:2px solid var(--mark);color:var(--mark)}
.heat tfoot td{font-weight:650;padding-top:5px}.heat tfoot .trained{border-bottom:2px solid var(--mark)}
.dense td{font-size:0;height:19px}
.none{background:repeating-linear-gradient(135deg,var(--faint) 0 4px,var(--line) 4px 5px);color:var(--soft)}
.scale{display:flex;flex-wrap:wrap;gap:4px 22px;font-size:13px;color:var(--soft);margin:6px 0 0}
.scale i{display:inline-block;width:15px;height:12px;vertical-align:-1px}
.box.framed{border:2px solid var(--mark)}
.swatch{display:inline-block;vertical-align:middle;margin:0 8px 2px 0}
.pairs-of-seeds tbody th small{display:block;color:var(--soft);font-weight:400}.pairs-of-seeds{width:auto}
.title.board{margin:20px 0 0}.score-board td{text-align:center;min-width:92px}
.score-board td small{white-space:normal;max-width:130px;margin:0 auto}
.score-board{width:auto}.fit{width:fit-content;max-width:100%;margin-top:6px}
.score-board .win{color:var(--win)}.score-board .loss{color:var(--loss)}.score-board .tie{color:var(--soft)}
.score-board b{display:block;font-weight:650}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:4px 0 2px;padding:0;font-size:13px;
color:var(--soft)}
.all{display:block;font-size:13px;color:var(--soft);margin:2px 0;cursor:pointer}
.all input{margin:0 7px 0 0;vertical-align:-1px;accent-color:var(--c-ntk)}.legend li.more{display:none}
.chart:has(.all input:checked) .more{display:inline}.chart:has(.all input:checked) .few{display:none}
.chart:has(.all input:checked) .legend li.more{display:flex}
.legend li{min-width:0;display:flex;align-items:center;gap:6px}
.chart{margin:18px 0 0;padding:14px 16px 12px;border:1px solid var(--line);border-radius:8px;
background:var(--panel);
position:relative;break-inside:avoid}
.grid .chart{margin:0}
.chart-title{font-weight:600}
.chart svg.wide,.chart svg.narrow{width:100%;height:auto;display:block;touch-action:pan-y}
.chart.half svg.wide{max-width:640px}.chart svg.narrow{max-width:440px}
.chart svg.narrow{display:none}.chart.third svg.narrow{display:block}
.chart.wide .legend,.chart.half .legend{display:none}
.chart.dots .legend,.chart.long .legend{display:flex}
svg text{fill:var(--soft);font-size:12px;font-family:inherit}
svg .end{font-size:11.5px;font-weight:600}svg .name{font-size:12px}
svg .grid{stroke:var(--line);stroke-width:1}svg .axis{stroke:var(--soft);stroke-width:1}
svg .mark{stroke:var(--mark);stroke-width:1.4;stroke-dasharray:5 3}svg .marked{fill:var(--mark);
font-weight:600}
figcaption{font-size:14px;margin-top:6px;max-width:80ch}
.tip{position:absolute;z-index:3;pointer-events:none;background:var(--panel);border:1px solid var(--soft);
border-radius:6px;
padding:6px 9px;font-size:12.5px;line-height:1.45;box-shadow:0 3px 12px rgb(0 0 0/.16);max-width:250px}
.tip b{display:block;font-weight:600}.tip i{display:inline-block;width:9px;height:9px;border-radius:50%;
margin-right:6px}
.tip span{float:right;margin-left:14px;font-variant-numeric:tabular-nums;font-weight:600}
.lineage{list-style:none;display:flex;flex-wrap:wrap;gap:12px 34px;margin:14px 0;padding:0}
.lineage li{position:relative;flex:1 1 190px;border:1px solid var(--line);border-top:4px solid var(--at,
var(--soft));
border-radius:8px;background:var(--panel);padding:10px 14px}
.lineage li+li:before{content:"→";position:absolute;left:-27px;top:50%;transform:translateY(-50%);
font-size:20px;color:var(--soft)}
.lineage b{display:block}.lineage span{display:block;font-size:13.5px;color:var(--soft);
overflow-wrap:anywhere}
dl.pairs{display:grid;grid-template-columns:minmax(110px,max-content) 1fr;gap:6px 20px;margin:10px 0}
dl.pairs dt{color:var(--soft)}dl.pairs dd{margin:0;overflow-wrap:anywhere;min-width:0}
dl.terms{display:grid;grid-template-columns:minmax(120px,200px) 1fr;gap:10px 22px;margin:12px 0}
dl.terms dt{font-weight:600}dl.terms dd{margin:0}
details{margin:14px 0;border:1px solid var(--line);border-radius:8px;background:var(--panel);padding:0 16px}
summary{cursor:pointer;padding:10px 0;font-weight:600}
details[open]{padding-bottom:14px}
footer{margin-top:64px;padding-top:16px;padding-bottom:48px;color:var(--soft);font-size:14px;
border-top:1px solid var(--line)}
@media (max-width:820px){
.chart svg.wide{display:none}.chart svg.narrow{display:block}
.chart.wide .legend,.chart.half .legend{display:flex}}
@media (max-width:680px){
main,header,footer{padding-left:16px;padding-right:16px}
header{padding-top:24px}h2{margin-top:44px}
.chart{padding:12px 8px 10px}.chart-title,.chart .legend,figcaption{margin-left:6px;margin-right:6px}
th,td{padding:6px 7px}thead th{white-space:normal;overflow-wrap:normal}.scores th,.scores td{padding:5px 5px}
.scores{font-size:13.5px}
.scores small{font-size:10.5px}
.scores td{min-width:54px}tbody th{min-width:84px;max-width:40vw}.swatch{margin-right:5px}.flag{margin-right:2px;
font-size:9px}
.score-board{font-size:13px}.score-board td{min-width:58px;padding:5px 3px}
.score-board td small{font-size:10.5px}.score-board tbody th{min-width:66px;padding:5px 6px}
.scores tbody th,.scores thead th:first-child{position:sticky;left:0;background:var(--panel);z-index:1}
dl.pairs,dl.terms{grid-template-columns:1fr;gap:0}dl.pairs dd,dl.terms dd{margin-bottom:10px}
.lineage{flex-direction:column;gap:30px}.lineage li{max-width:none;flex:none}
.lineage li+li:before{content:"↓";left:50%;top:-16px;transform:translate(-50%,-50%)}}
@media (max-width:520px){
.stacked table,.stacked{width:100%}.stacked tr{display:grid;grid-template-columns:repeat(var(--n),minmax(48px,1fr))}
.stacked th:first-child{grid-column:1/-1;position:static!important;max-width:none;border-bottom:0;padding-bottom:1px}
.stacked tbody td{border-top:0;padding:2px 4px 5px;min-width:0}
.stacked td small,.stacked thead small{white-space:normal}
.stacked thead th{min-width:0;padding:3px 4px}.stacked .trained{border-top:0}}
@media print{:root{color-scheme:light;--bg:#fff;--panel:#fff;--ink:#000;--soft:#444;--line:#bbb;
--faint:#f4f4f4}
body{font-size:11pt}nav,.tip{display:none}table,.chart,.scroll{break-inside:avoid}.scroll{overflow:visible}
h2,h3,h4{break-after:avoid}.scores td,.heat td,.scale i{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

# Follows the pointer over a chart: a thin line at the nearest point, and the value of each curve there. The page works
# without it: every chart has its numbers in a title and a description, and most have them in a table.
SCRIPT = """
(function(){
document.querySelectorAll('figure.chart').forEach(function(figure){
var data;try{data=JSON.parse(figure.dataset.chart)}catch(e){return}
var tip=document.createElement('div');tip.className='tip';tip.hidden=true;tip.setAttribute('aria-hidden',
'true');
figure.appendChild(tip);
figure.querySelectorAll('svg[data-plot]').forEach(function(svg){
svg.querySelectorAll('title').forEach(function(t){t.remove()});
var p=JSON.parse(svg.dataset.plot),left=p[0],right=p[1],top=p[2],bottom=p[3];
function place(v,low,high,log,a,b){var s=low===high?.5:log?Math.log(v/low)/Math.log(high/low):(v-low)/(high-low);
return a+(b-a)*Math.min(Math.max(s,0),1)}
function px(v){return place(v,p[4],p[5],p[6],left,right)}
function py(v){return place(v,p[7],p[8],p[9],bottom,top)}
var layer=document.createElementNS(svg.namespaceURI,'g');layer.setAttribute('class','tip-layer');svg.appendChild(layer);
function add(name,attributes){var node=document.createElementNS(svg.namespaceURI,name);
for(var key in attributes)node.setAttribute(key,attributes[key]);layer.appendChild(node);return node}
function clear(){layer.textContent='';tip.hidden=true}
function show(event){
var box=svg.getBoundingClientRect(),scale=svg.viewBox.baseVal.width/box.width,
at=(event.clientX-box.left)*scale;
layer.textContent='';
if(at<left-8||at>right+8){tip.hidden=true;return}
var found=[],near=null;
data.series.forEach(function(s){var best=null,gap=1e9,box=figure.parentNode.closest('.many')||figure;
box=s.m&&box.querySelector('.all input');if(box&&!box.checked)return;
s.p.forEach(function(q){var d=Math.abs(px(q[0])-at);if(d<gap){gap=d;best=q}});
if(best){found.push([s,best,gap]);if(near===null||gap<near[2])near=[s,best,gap]}});
if(!near){clear();return}
var x=px(near[1][0]);
found=found.filter(function(f){return Math.abs(px(f[1][0])-x)<14}).sort(function(a,b){return b[1][1]-a[1][1]}
);
add('line',{x1:x,x2:x,y1:top,y2:bottom,'class':'axis',opacity:.6});
tip.textContent='';var head=document.createElement('b');head.textContent=data.x+': '+near[1][2];
tip.appendChild(head);
found.forEach(function(f){
add('circle',{cx:px(f[1][0]),cy:py(f[1][1]),r:4,fill:'var(--c-'+f[0].c+')',stroke:'var(--panel)'});
var row=document.createElement('div'),dot=document.createElement('i'),value=document.createElement('span');
dot.style.background='var(--c-'+f[0].c+')';value.textContent=f[1][3];
row.appendChild(value);row.appendChild(dot);row.appendChild(document.createTextNode(f[0].n));
tip.appendChild(row)});
tip.hidden=false;
var frame=(tip.offsetParent||figure).getBoundingClientRect(),cx=box.left-frame.left+x/scale,width=tip.offsetWidth;
var to=cx+14+width>frame.width-4?cx-14-width:cx+14;
tip.style.left=Math.max(4,Math.min(to,frame.width-width-4))+'px';
tip.style.top=Math.max(4,box.top-frame.top+6)+'px'}
svg.addEventListener('pointermove',show);svg.addEventListener('pointerdown',show);
svg.addEventListener('pointerleave',clear)})})})();
"""

# ---------------------------------------------------------------------------------------------------------------------
# Heat maps of analyses

# Of analyses, which a page has only if it shows one.
MAPS_CSS = """
.many{margin-top:22px}.many .legend{display:flex!important}
.smalls{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));gap:6px 10px;margin:8px 0 2px;
position:relative}
.chart.small{position:static;border:0;padding:0;margin:0;background:none;min-width:0}
.chart.small .chart-title{font-size:13px;margin:0}
.chart.small svg{width:100%;height:auto;display:block;touch-action:pan-y}
.chart.small svg text{font-size:11.5px}.smalls .tip{z-index:4}
.analysis-maps .cells{position:relative;min-height:40px;touch-action:pan-y;cursor:crosshair;
background:repeating-linear-gradient(135deg,var(--panel) 0 3px,
color-mix(in srgb,var(--soft) 45%,var(--panel)) 3px 4px)}
.analysis-maps .cells img{position:absolute;inset:0;width:100%;height:100%;image-rendering:pixelated;user-select:none}
.analysis-maps .cell{position:absolute;outline:2px solid #fff;box-shadow:0 0 0 3px #000;pointer-events:none;z-index:2}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));gap:8px 14px;margin-top:12px;
align-items:end}
.panels p{font-size:13px;line-height:1.3;margin:0 0 3px}
.panel{min-width:0;break-inside:avoid}.panel.on p{font-weight:650}.panel.on .cells{outline:2px solid var(--c-ntk);
outline-offset:2px}
.large{margin:10px 0 12px}.large[hidden]{display:none}
.slider{display:flex;flex-wrap:wrap;align-items:center;gap:2px 12px;font-size:14px;margin-bottom:10px}
.slider input{flex:1 1 140px;min-width:60px;accent-color:var(--c-ntk)}.slider output{min-width:5.5em;font-weight:600}
.plot{display:grid;grid-template-columns:auto auto minmax(0,var(--widest));justify-content:start;gap:0 6px;
font-size:12px;line-height:16px;color:var(--soft);padding-right:10px}
.row-label{writing-mode:vertical-rl;transform:rotate(180deg);text-align:center;grid-row:1}
.row-ticks{position:relative;grid-row:1}.row-ticks span{position:absolute;right:0;transform:translateY(-50%);
white-space:nowrap}
.large-cells{grid-row:1;min-width:0}.large .cells{min-height:var(--least);width:100%}
.column-ticks{grid-column:3;position:relative;height:18px}.column-ticks span{position:absolute;top:2px;
transform:translateX(-50%);white-space:nowrap}
.column-label{grid-column:3;text-align:center}
.large .value:empty{display:none}
.large .value{margin:6px 0 0;font-size:14px;min-height:1.5em;font-variant-numeric:tabular-nums;max-width:none}
.scale img.colours{width:160px;height:12px;vertical-align:-1px;margin:0 6px;image-rendering:auto}
.analysis-maps .scale{margin:4px 0 0}
@media (max-width:680px){.wide-only{display:none}.analysis-maps .soft,.analysis-maps .scale,.many>.soft{margin-left:6px;
margin-right:6px}.plot{padding-right:4px}}
@media print{.large[hidden]+p{margin-top:6px}.cells,.scale img{print-color-adjust:exact;
-webkit-print-color-adjust:exact}}
"""

# Unhides the large view of each figure of heat maps, and tells the value of the cell below a pointer, or of the cell
# that the arrow keys chose.
MAPS_SCRIPT = """
(function(){
document.querySelectorAll('figure.analysis-maps').forEach(function(figure){
var names=JSON.parse(figure.dataset.maps),panels=names.panels,rows=names.rows,columns=names.columns,labels=names.labels;
var bytes=Uint8Array.from(atob(figure.dataset.values),function(c){return c.charCodeAt(0)});
var values=new DataView(bytes.buffer);
function value(p,r,c){var v=values.getFloat32(4*((p*rows.length+r)*columns.length+c),true);
return isNaN(v)?'not measured':String(Number(v.toPrecision(6)))}
var large=figure.querySelector('.large'),slider=large.querySelector('input'),shown=large.querySelector('output'),
main=large.querySelector('.cells'),told=large.querySelector('.value'),
small=Array.from(figure.querySelectorAll('.panel'));
var at={p:0,r:0,c:0},chosen=false,tip=document.createElement('div'),frame=document.createElement('i');
tip.className='tip';tip.hidden=true;tip.setAttribute('aria-hidden','true');figure.appendChild(tip);
frame.className='cell';large.hidden=false;
function pair(label,text){var line=document.createElement('div'),end=document.createElement('span');
end.textContent=text;line.appendChild(end);line.appendChild(document.createTextNode(label));tip.appendChild(line)}
function called(n,name){return /^\\d/.test(name)?short(n)+' '+name:name}
function short(n){return labels[n].split(',')[0]}
function tell(){told.textContent=[panels[at.p],called(1,rows[at.r]),called(2,columns[at.c])].join(', ')+
': '+value(at.p,at.r,at.c)}
function hide(){tip.hidden=true;frame.remove()}
function show(cells,p,r,c){
at={p:p,r:r,c:c};chosen=true;tip.textContent='';
var head=document.createElement('b');head.textContent=panels[p];tip.appendChild(head);
pair(short(1),rows[r]);pair(short(2),columns[c]);pair(labels[3],value(p,r,c));
cells.appendChild(frame);
frame.style.left=100*c/columns.length+'%';frame.style.width=100/columns.length+'%';
frame.style.top=100*r/rows.length+'%';frame.style.height=100/rows.length+'%';
tip.hidden=false;
var box=cells.getBoundingClientRect(),around=figure.getBoundingClientRect(),
x=box.left-around.left+box.width*(c+.5)/columns.length,y=box.top-around.top+box.height*r/rows.length;
var to=x+14+tip.offsetWidth>around.width-4?x-14-tip.offsetWidth:x+14;
tip.style.left=Math.max(4,Math.min(to,around.width-tip.offsetWidth-4))+'px';
tip.style.top=Math.max(4,y-tip.offsetHeight-8)+'px';
tell()}
function choose(p){
at.p=p;
if(slider){slider.value=p;shown.textContent=panels[p];slider.setAttribute('aria-valuetext',panels[p])}
if(small.length){var image=small[p].querySelector('img');
main.querySelector('img').src=image.src;main.querySelector('img').alt=panels[p]+': '+image.alt}
small.forEach(function(one,n){one.classList.toggle('on',n===p)});
if(chosen)tell()}
function follow(cells,panel){
function point(event){var box=cells.getBoundingClientRect();
function index(share,count){return Math.min(Math.max(Math.floor(share*count),0),count-1)}
show(cells,panel(),index((event.clientY-box.top)/box.height,rows.length),
index((event.clientX-box.left)/box.width,columns.length))}
cells.addEventListener('pointermove',point);cells.addEventListener('pointerdown',point);
cells.addEventListener('pointerleave',function(event){if(event.pointerType!=='touch')hide()})}
follow(main,function(){return slider?+slider.value:0});
small.forEach(function(one,n){var cells=one.querySelector('.cells');follow(cells,function(){return n});
cells.addEventListener('click',function(){choose(n)})});
if(slider)slider.addEventListener('input',function(){hide();choose(+slider.value)});
main.addEventListener('keydown',function(event){
var step={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]}[event.key];
if(event.key==='Escape')hide();
if(!step)return;
event.preventDefault();
var p=slider?+slider.value:0,first=!chosen||tip.hidden;
show(main,p,first?at.r:Math.min(Math.max(at.r+step[0],0),rows.length-1),
first?at.c:Math.min(Math.max(at.c+step[1],0),columns.length-1))});
main.addEventListener('blur',hide);told.textContent='Point at a cell, or choose the map and use the arrow keys.';
choose(0)})})();
"""

# ---------------------------------------------------------------------------------------------------------------------
# Figures and tables as files

# The colours of light pages, by the names of the stylesheet's variables without `c-`.
PALETTE = dict(re.findall(r"--(?:c-)?([\w-]+):(#\w+)", CSS.partition("@media")[0]))
FONTS = "Liberation Sans, Helvetica, Arial, DejaVu Sans, sans-serif"
# What the stylesheet says of the classes inside charts, as attributes: a file has no stylesheet.
ATTRIBUTES = {
    "grid": f' stroke="{PALETTE["line"]}" stroke-width="1"',
    "axis": f' stroke="{PALETTE["soft"]}" stroke-width="1"',
    "mark": f' stroke="{PALETTE["mark"]}" stroke-width="1.4" stroke-dasharray="5 3"',
    "marked": f' fill="{PALETTE["mark"]}" font-weight="600"',
    "end": ' font-size="11.5" font-weight="600"',
    "block-title": f' font-weight="600" fill="{PALETTE["ink"]}"',
    "file-title": f' font-size="14" font-weight="600" fill="{PALETTE["ink"]}"',
}

FILES_CSS = """
.files{display:flex;gap:4px 10px;justify-content:flex-end;margin:4px 2px 0}
.files button{font:inherit;font-size:12px;color:var(--soft);background:none;border:0;padding:2px 3px;cursor:pointer;
text-decoration:underline;text-underline-offset:3px}
.files button:hover{color:var(--ink)}
.fit+.files{justify-content:flex-start}
@media print{.files{display:none}}
"""

# Buttons below each figure and table, made by the script, which alone can save a file. A link to a part that is folded
# unfolds it.
FILES_SCRIPT = """
(function(){
var space=new DOMParser().parseFromString('<svg/>','text/html').body.firstChild.namespaceURI;
var palette=%(palette)s,attributes=%(attributes)s,fonts=%(fonts)s;
function slug(words){return words.toLowerCase().replace(/×/g,'x').replace(/β/g,'beta').replace(/[^a-z0-9]+/g,'-')
.replace(/^-+|-+$/g,'').slice(0,60).replace(/-+$/,'')}
var seen={};
function named(node,title){var run=node.closest('[data-run]');
var name=[run?slug(run.dataset.run):'',slug(title)].filter(Boolean).join('-')||'table';
seen[name]=(seen[name]||0)+1;return seen[name]>1?name+'-'+seen[name]:name}
function save(name,blob){var link=document.createElement('a');link.href=URL.createObjectURL(blob);link.download=name;
document.body.appendChild(link);link.click();link.remove();setTimeout(function(){URL.revokeObjectURL(link.href)},9999)}
function csv(rows){return new Blob([rows.map(function(row){return row.map(function(value){value=String(value);
return /[",\\n\\r]/.test(value)?'"'+value.replace(/"/g,'""')+'"':value}).join(',')+'\\n'}).join('')],{type:'text/csv'})}
function words(node){if(node.nodeType===3)return [node.data];if(node.localName==='svg')return [];
return Array.from(node.childNodes).reduce(function(all,one){return all.concat(words(one))},[])}
function tableRows(table){
var rows=Array.from(table.rows).map(function(row){return Array.from(row.cells).map(function(cell){
return [words(cell).join(' ').split(/\\s+/).filter(Boolean).join(' '),
cell.hasAttribute('data-csv')?cell.dataset.csv.split('|'):null]})});
var sizes=rows[0].map(function(_,n){return Math.max.apply(null,[1].concat(rows.slice(1).map(function(row){
return row[n]&&row[n][1]?row[n][1].length:1})))});
return rows.map(function(row,r){return row.reduce(function(all,cell,n){
var values=r?cell[1]||[cell[0]]:['',' low',' high'].slice(0,sizes[n]).map(function(part){return cell[0]+part});
while(values.length<sizes[n])values=values.concat(['']);
return all.concat(values)},[])})}
function chartRows(data,panel){return data.series.reduce(function(rows,series){return rows.concat(
series.p.map(function(p){var ends=p.length>4?[p[4],p[5]]:['',''];
return (panel===undefined?[]:[panel]).concat([series.n,p[0],p[1]],ends)}))},[])}
function light(markup){return markup.replace(/ class="([\\w-]+)"/g,function(_,name){return attributes[name]||''})
.replace(/var\\(--(?:c-)?([\\w-]+)\\)/g,function(_,name){return palette[name]||'#000'})}
function root(box,inner){var size=box.split(' ');
return '<svg xmlns="'+space+'" viewBox="'+box+'" width="'+size[2]+'" height="'+size[3]+
'" font-family="'+fonts+'" font-size="12" fill="'+palette.soft+'">'+inner+'</svg>'}
function all(node){var chart=node.closest('.many')||node.closest('.chart'),box=chart&&chart.querySelector('.all input');
return box&&box.checked}
function asked(text,node){return all(node)?text.replace(/class="more" display="none"/g,'class="more"')
.replace(/class="few"/g,'class="few" display="none"'):text}
function markup(svg){var copy=svg.cloneNode(true),layer=copy.querySelector('.tip-layer');if(layer)layer.remove();
return new XMLSerializer().serializeToString(copy).replace(/^<svg[^>]*>/,'').replace(/<\\/svg>$/,'')}
function drawn(svg){var file=JSON.parse(svg.dataset.file);return root(file[0],light(asked(file[1]+markup(svg),svg)))}
function escaped(text){return text.replace(/&/g,'&amp;').replace(/</g,'&lt;')}
function grid(title,cells,width,height){
var across=Math.min(cells.length,5),down=Math.ceil(cells.length/across);
var w=across*(width+16)+8,h=down*(height+30)+34;
return root('0 0 '+w+' '+h,light('<rect width="'+w+'" height="'+h+'" fill="#fff"/>'+
'<text x="8" y="20" class="file-title">'+escaped(title)+'</text>'+
cells.map(function(cell,n){var x=8+n%%across*(width+16),y=34+Math.floor(n/across)*(height+30);
return '<text x="'+x+'" y="'+(y+12)+'">'+escaped(cell[0])+'</text>'+cell[1](x,y+18)}).join('')))}
function png(name,text){var size=/viewBox="[^"]* ([\\d.]+) ([\\d.]+)"/.exec(text),image=new Image();
image.onload=function(){var canvas=document.createElement('canvas');canvas.width=2*size[1];canvas.height=2*size[2];
canvas.getContext('2d').drawImage(image,0,0,canvas.width,canvas.height);
canvas.toBlob(function(blob){save(name,blob)},'image/png')};
image.src='data:image/svg+xml;charset=utf-8,'+encodeURIComponent(text)}
function offer(node,title,rows,picture){
var line=document.createElement('div'),name=named(node,title);line.className='files';
function button(kind,work){var one=document.createElement('button');one.type='button';one.textContent=kind;
one.setAttribute('aria-label',kind+' of '+title);one.addEventListener('click',work);line.appendChild(one)}
button('CSV',function(){save(name+'.csv',csv(rows()))});
if(picture){button('SVG',function(){save(name+'.svg',new Blob([picture()],{type:'image/svg+xml'}))});
button('PNG',function(){png(name+'.png',picture())})}
if(node.getAttribute('role')==='region')node.after(line);else node.appendChild(line)}
function title(figure){return figure.querySelector('.chart-title,.title').textContent}
document.querySelectorAll('[role=region]>table,figure.chart:not(.small),.chart.many').forEach(function(node){
if(node.localName==='table'){var label=node.parentNode.getAttribute('aria-label').replace(/, table$/,'');
return offer(node.parentNode,label,function(){return tableRows(node)})}
var svg=node.querySelector('svg[data-file]');
if(node.classList.contains('many')){
var panels=Array.from(node.querySelectorAll('figure.small'));
var first=JSON.parse(panels[0].dataset.chart),sides=panels[0].querySelector('svg').viewBox.baseVal;
return offer(node,title(node),function(){return panels.reduce(function(rows,one){
return rows.concat(chartRows(JSON.parse(one.dataset.chart),title(one)))},
[['panel','series',first.x,first.y,'low','high']])},
function(){return grid(title(node),panels.map(function(one){return [title(one),function(x,y){
return '<g transform="translate('+x+' '+y+')">'+asked(markup(one.querySelector('svg')),one)+'</g>'}]}),
sides.width,sides.height)})}
if(node.dataset.maps){
var names=JSON.parse(node.dataset.maps),bytes=Uint8Array.from(atob(node.dataset.values),function(c){
return c.charCodeAt(0)}),values=new DataView(bytes.buffer),n=0;
return offer(node,title(node),function(){n=0;var rows=[['panel','row','column','value']];
names.panels.forEach(function(p){names.rows.forEach(function(r){names.columns.forEach(function(c){
var v=values.getFloat32(4*n++,true);rows.push([p,r,c,isNaN(v)?'':Number(v.toPrecision(6))])})})});return rows},
function(){var images=node.querySelectorAll('.panel img');if(!images.length)images=node.querySelectorAll('.cells img');
return grid(title(node),names.panels.map(function(p,i){return [p,function(x,y){
return '<image x="'+x+'" y="'+y+'" width="180" height="120" preserveAspectRatio="none" '+
'style="image-rendering:pixelated" href="'+images[i].src+'"/>'}]}),180,120)})}
if(!svg)return;
offer(node,title(node),function(){
if(node.dataset.table)return JSON.parse(node.dataset.table);var data=JSON.parse(node.dataset.chart);
return [['series',data.x,data.y,'low','high']].concat(chartRows(data))},function(){return drawn(svg)})});
function unfold(){var target=location.hash&&document.getElementById(decodeURIComponent(location.hash.slice(1)));
if(!target)return;
for(var part=target.closest('details');part;part=part.parentNode.closest('details'))part.open=true;
target.scrollIntoView()}
addEventListener('hashchange',unfold);unfold()})();
""" % {name: json.dumps(value) for name, value in (("palette", PALETTE), ("attributes", ATTRIBUTES), ("fonts", FONTS))}
