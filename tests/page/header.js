(name) => {
  const select = document.querySelector('#model');
  select.replaceChildren(new Option(name));
  const style = getComputedStyle(select);
  const text = document.createElement('canvas').getContext('2d');
  text.font = style.font;
  const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  const header = document.querySelector('header').getBoundingClientRect();
  const boxes = [...document.querySelectorAll('header > *')]
    .map((one) => [one.id, one.getBoundingClientRect()])
    .filter(([, box]) => box.width > 1 && box.height > 1);
  const outside = boxes.filter(([, box]) => box.left < header.left - 1
    || box.right > header.right + 1);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const covered = boxes.filter(([, a], at) =>
    boxes.some(([, b], other) => other > at && meet(a, b)));
  return [outside.map(([id]) => id), covered.map(([id]) => id),
    select.clientWidth - padding, text.measureText(name).width];
}
