(least) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => {
    const part = top[3] / 255;
    return [0, 1, 2].map((n) => top[n] * part + below[n] * (1 - part)).concat(255);
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    }
    return layers.reduce((below, top) => over(top, below), [255, 255, 255, 255]);
  };
  const light = ([r, g, b]) => [r, g, b].map((one) => {
    const part = one / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const found = [];
  const check = (node, style, text) => {
    const below = behind(node);
    const value = ratio(over(rgba(style.color), below), below);
    if (value < least) found.push([value.toFixed(2), node.tagName, node.className, text]);
  };
  for (const node of document.querySelectorAll("body *")) {
    const said = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data);
    const text = said.join("").trim();
    if (text && node.checkVisibility() && node.tagName !== "OPTION") {
      check(node, getComputedStyle(node), text.slice(0, 30));
    }
    if (node.placeholder) check(node, getComputedStyle(node, "::placeholder"), node.placeholder);
  }
  return found;
}
