"""The CSS and the JavaScript of analyses, which a page has only if it shows one."""

CSS = """
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
SCRIPT = """
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
