"""The links below the figures and tables of a page that save them as files: their CSS, and their JavaScript."""

from __future__ import annotations

import json
import re

from pe_lab.page.stylesheet import CSS as PAGE_CSS

# The colours of light pages, by the names of the stylesheet's variables without `c-`.
PALETTE = dict(re.findall(r"--(?:c-)?([\w-]+):(#\w+)", PAGE_CSS.partition("@media")[0]))
FONTS = "Liberation Sans, Helvetica, Arial, DejaVu Sans, sans-serif"
# What the stylesheet says of the classes inside charts, as attributes: a file has no stylesheet.
ATTRIBUTES = {
    "grid": f' stroke="{PALETTE["line"]}" stroke-width="1"',
    "axis": f' stroke="{PALETTE["soft"]}" stroke-width="1"',
    "mark": f' stroke="{PALETTE["mark"]}" stroke-width="1.4" stroke-dasharray="5 3"',
    "marked": f' fill="{PALETTE["mark"]}" font-weight="600"',
    "end": ' font-size="11.5" font-weight="600"',
    "file-title": f' font-size="14" font-weight="600" fill="{PALETTE["ink"]}"',
}

CSS = """
.files{display:flex;gap:4px 10px;justify-content:flex-end;margin:4px 2px 0}
.files button{font:inherit;font-size:12px;color:var(--soft);background:none;border:0;padding:2px 3px;cursor:pointer;
text-decoration:underline;text-underline-offset:3px}
.files button:hover{color:var(--ink)}
.fit+.files{justify-content:flex-start}
@media print{.files{display:none}}
"""

# Buttons below each figure and table, made by the script, which alone can save a file. A link to a part that is folded
# unfolds it.
SCRIPT = """
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
