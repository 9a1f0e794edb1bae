"""JSON schema of the RayJobs that KubeRay (ray.io/v1) takes, without the pods, which are Kubernetes' own.

Written from KubeRay's API types and the reference generated from them, and compared field by field with the published
definition (`ray.io_rayjobs.yaml` of a release with `authOptions`): each field here is there, at the same place and of
the same type. Left out are `deletionStrategy`, `networkIsolation`, `tlsOptions`, `upgradeStrategy` and the groups'
`labels` and `resources`: an older operator's definition would silently drop them. For the same reason any other field
is an error here, while Kubernetes would ignore it. `required` is what any version since 1.5.1 requires. What the
operator itself refuses (service type, counts below zero, a time to live without a shutdown) is here too, although the
definition takes any value there.
"""

STRING, BOOL, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
COUNT = INT32 | {"minimum": 0}
STRINGS = {"type": "object", "additionalProperties": STRING}
KUBERNETES = {"type": "object"}  # checked with Kubernetes' schema
MANAGERS = {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]}


def closed(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


AUTOSCALER = closed(
    env={"type": "array", "items": KUBERNETES},
    envFrom={"type": "array", "items": KUBERNETES},
    idleTimeoutSeconds=COUNT,
    image=STRING,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    resources=KUBERNETES,
    securityContext=KUBERNETES,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    volumeMounts={"type": "array", "items": KUBERNETES},
)
HEAD = closed(
    ("rayStartParams", "template"),
    enableIngress=BOOL,
    headService=KUBERNETES,
    rayStartParams=STRINGS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    template=KUBERNETES,
)
WORKERS = closed(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=STRING,
    idleTimeoutSeconds=COUNT,
    maxReplicas=COUNT,
    minReplicas=COUNT,
    numOfHosts=INT32 | {"minimum": 1},
    rayStartParams=STRINGS,
    replicas=COUNT,
    scaleStrategy=closed(workersToDelete={"type": "array", "items": STRING}),
    suspend=BOOL,
    template=KUBERNETES,
)
CLUSTER = closed(
    ("headGroupSpec",),
    authOptions=closed(mode={"enum": ["disabled", "token"]}),
    autoscalerOptions=AUTOSCALER,
    enableInTreeAutoscaling=BOOL,
    gcsFaultToleranceOptions=closed(
        ("redisAddress",),
        externalStorageNamespace=STRING,
        redisAddress=STRING,
        redisPassword=closed(value=STRING, valueFrom=KUBERNETES),
        redisUsername=closed(value=STRING, valueFrom=KUBERNETES),
    ),
    headGroupSpec=HEAD,
    headServiceAnnotations=STRINGS,
    managedBy=MANAGERS,
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    suspend=BOOL,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
SPEC = closed(
    activeDeadlineSeconds=INT32 | {"minimum": 1},
    backoffLimit=COUNT,
    clusterSelector=STRINGS,
    entrypoint=STRING,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=STRING,
    jobId=STRING,
    managedBy=MANAGERS,
    metadata=STRINGS,
    rayClusterSpec=CLUSTER,
    runtimeEnvYAML=STRING,
    shutdownAfterJobFinishes=BOOL,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    submitterConfig=closed(backoffLimit=COUNT),
    submitterPodTemplate=KUBERNETES,
    suspend=BOOL,
    ttlSecondsAfterFinished=COUNT,
) | {
    "if": {"required": ["ttlSecondsAfterFinished"], "properties": {"ttlSecondsAfterFinished": {"minimum": 1}}},
    "then": {"required": ["shutdownAfterJobFinishes"], "properties": {"shutdownAfterJobFinishes": {"const": True}}},
}
RAYJOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=KUBERNETES,
    spec=SPEC,
)
