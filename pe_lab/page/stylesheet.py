"""The CSS of the page and the JavaScript of the charts' tooltips, as text to put inside the page."""

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
